"""Directives of what the code itself knows of a probe, so that a page cannot go stale.

`probe-pages GROUP` writes the table of the pages of a group. `probe-reference NAME` writes the defaults, the options,
the figures with their meaning, the coverage of the intervals, and all stored numbers with their units. `results-format
VERSION` writes all that the results file of a release stores, from a file that it wrote.
"""

from __future__ import annotations

import atexit
import gzip
import io
import os
import re
import shutil
import tempfile
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import h5py
import numpy as np
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx


class ProbeReference(Directive):
    """Insert the reference of the probe that the argument names."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        return [*_defaults(name), *_options(name), *_figures(name), *_coverage(name), *_quantities(name)]


class ProbePages(Directive):
    """Insert the questions of the pages of a group of probes, which the argument names, with links to them."""

    required_arguments: ClassVar[int] = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        from landscape.probes import OWN, PROBES

        names = [name for name in OWN if PROBES[name].group == self.arguments[0]]
        rows = [f"| [{name}]({name}.md) | {question(name)} |" for name in names]
        tree = ["```{toctree}", ":hidden:", "", *(f"{name} <{name}>" for name in names), "```"]
        found = nodes.container()
        self.state.nested_parse(StringList(["| probe | the question |", "| --- | --- |", *rows, "", *tree]), 0, found)
        return found.children


class ResultsFormat(Directive):
    """Insert what the results file of a release stores: a table of quantities for every probe."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        import landscape

        stored = gzip.decompress((Path(__file__).parent / "format" / f"{self.arguments[0]}.h5.gz").read_bytes())
        found: list[nodes.Node] = []
        with h5py.File(io.BytesIO(stored)) as file:
            for probe, groups in file.items():
                known = _declared(probe) if self.arguments[0] == landscape.__version__ else {}
                rows = [_stored(name, array, known.get(name)) for name, array in next(iter(groups.values())).items()]
                found += [
                    nodes.rubric(text=probe),
                    _table(("name", "what it is", "unit", "axes", "type"), rows, code=1),
                ]
        return found


def _stored(name: str, array: h5py.Dataset, declared: Any) -> tuple[str, ...]:
    """Name, meaning, unit, axes and type of a stored array; what its probe declares, if the file has its bare name."""
    axes = [axis[0].name.rpartition("/")[2] if len(axis) else "itself" for axis in array.dims]
    about = [str(array.attrs.get(key, "")) for key in ("long_name", "units")]
    if declared is not None and about[0].replace(" ", "_") == name:
        about = [declared.long_name, declared.units]
    return name, *about, " × ".join(axes) or "one number", "text" if array.dtype == object else str(array.dtype)


@cache
def _declared(name: str) -> dict[str, Any]:
    """What a probe declares of the arrays that it stores; the made-up file of a release has bare names instead."""
    import landscape
    from landscape.monitoring.stored_series import plan_of
    from landscape.probes import PROBES, probe_class

    subject = landscape.load(_run() / "final.pt", data="digits", split="train", samples=32, batch_size=16)
    plans = [_plan(name) if name in PROBES else plan_of(subject, 1, 4, np.zeros(0))]
    if name == "line":  # it has a barrier between two checkpoints
        plans.append(probe_class(name)(along=str(_run() / "init.pt")).plan(subject))
    labels = [{key: quantity for key, (quantity, _) in plan.labels.items()} for plan in plans]
    return dict(
        ChainMap(*(table for plan in plans for table in (plan.about, plan.summaries, plan.quantities)), *labels)
    )


def question(name: str) -> str:
    """The question of a probe: the first paragraph of its page."""
    return (Path(__file__).parent / "probes" / f"{name}.md").read_text().split("\n\n")[1].replace("\n", " ")


def _defaults(name: str) -> list[nodes.Node]:
    from landscape.probes import FEATURES, probe_class

    probe = probe_class(name)
    text = (
        f"Unless you ask for others: samples of the {probe.split} split in mini-batches of {probe.batch_size}"
        f"{', in the order of their source' if probe.ordered else ''}."
    )
    if name in FEATURES:
        text += " One forward pass of landscape features measures it together with " + _words(
            other for other in FEATURES if other != name
        )
        text += "."
    if probe.by_process_group:
        text += " torchrun divides its products among several processes."
    return [nodes.paragraph(text=text)]


def _coverage(name: str) -> list[nodes.Node]:
    """The rows of a probe in the certificates, with the conditions of their cases; none for what has no interval."""
    page = (Path(__file__).parents[1] / "benchmarks" / "CERTIFICATES.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    conditions = {row[0]: row[1] for row in cells if len(row) == 2}
    rows = [
        (number.replace("\\|", "|"), conditions[case], f"{redraws} of {redrawn}", coverage.strip("*"))
        for probe, number, case, redrawn, redraws, *_, coverage in (row for row in cells if len(row) == 9)
        if probe == name and "[" in coverage
    ]
    if not rows:
        return []
    head = ("number", "case", "redraws", "share that holds the truth, %")
    return [
        nodes.rubric(text="Coverage of the intervals (page certificates)"),
        _table(head, rows, code=0),
    ]


def _options(name: str) -> list[nodes.Node]:
    from landscape.probes import probe_class

    probe = probe_class(name)
    hints = get_type_hints(probe, include_extras=True)
    rows = []
    for option in fields(probe):
        metadata = getattr(hints[option.name], "__metadata__", ())
        words = next((str(word) for word in metadata if isinstance(word, str)), "")
        rows.append((f"--{option.name.replace('_', '-')}", _shown(option.default), words))
    return [nodes.rubric(text="Options"), _table(("option", "default", "what it does"), rows, code=1)] if rows else []


def _figures(name: str) -> list[nodes.Node]:
    from landscape.plots import FIGURES

    found = [figure for figure in FIGURES.values() if figure.probe == name]
    rows = [(figure.name, import_module(f"landscape.plots.figures.{figure.name}").MEANING) for figure in found]
    return [nodes.rubric(text="Figures"), _table(("figure", "what it shows, and what not"), rows, code=1)]


def _quantities(name: str) -> list[nodes.Node]:
    plan = _plan(name)
    labels = {label: quantity for label, (quantity, _) in plan.labels.items()}
    rows = [
        (key, quantity.long_name, quantity.units, " × ".join((*axes, *quantity.dims)) or "one number")
        for group, axes in ((plan.quantities, tuple(plan.over)), (plan.summaries, ()), (labels, ()))
        for key, quantity in group.items()
    ]
    table = _table(("name", "what it is", "unit", "axes"), rows, code=1)
    if len(rows) <= 16:
        return [nodes.rubric(text="Stored numbers"), table]
    opening = nodes.raw("", f"<details><summary>All {len(rows)} stored numbers</summary>", format="html")
    return [nodes.rubric(text="Stored numbers"), opening, table, nodes.raw("", "</details>", format="html")]


@cache
def _plan(name: str) -> Any:
    """The plan of a probe for a small network, which knows every number that the probe would store."""
    import landscape
    from landscape.probes import probe_class

    probe = probe_class(name)
    data: dict[str, Any] = {"data": "digits", "split": probe.split, "samples": 32, "batch_size": 16}
    if probe.ordered:
        data["ordered"] = True
    return probe(**probe.smallest).plan(landscape.load(_run() / "final.pt", **data))


@cache
def _run() -> Path:
    """The folder of a short training run, made once per build."""
    from landscape.cli.main import exit_code

    folder = Path(tempfile.mkdtemp(prefix="landscape-docs-")) / "run"
    atexit.register(shutil.rmtree, folder.parent)
    data = ["--data", "digits", "--fraction", "0.1", "--epochs", "1"]
    if exit_code(["train", "vit_demo", *data, "--out", str(folder), "--quiet"]):
        raise RuntimeError("the network of the documentation could not be trained")
    return folder


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, code: int) -> nodes.table:
    """A table whose first `code` columns are literal."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    group += nodes.thead("", _row([nodes.paragraph(text=word) for word in head]))
    body = nodes.tbody()
    for row in rows:
        cells = [nodes.literal(text=cell) if i < code else nodes.Text(cell) for i, cell in enumerate(row)]
        body += _row([nodes.paragraph("", "", cell) for cell in cells])
    group += body
    return nodes.table("", group, classes=["reference"])


def _row(cells: Iterable[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", cell) for cell in cells))


def _shown(value: object) -> str:
    if value is None or value == "" or value == ():
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _words(items: Iterable[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    os.environ.setdefault("LANDSCAPE_CACHE", "")
    app.add_directive("probe-reference", ProbeReference)
    app.add_directive("probe-pages", ProbePages)
    app.add_directive("results-format", ResultsFormat)
    return {"parallel_read_safe": True}

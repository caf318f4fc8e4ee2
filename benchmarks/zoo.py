"""Measure what works on networks of timm, torchvision and transformers with random weights, one row per network.

    python benchmarks/zoo.py --rows zoo.jsonl [--shard 1/4] [--only PATTERN] [--sample 0.1 --seed 0]
    python benchmarks/zoo.py --rows zoo.jsonl --write docs/zoo.md
    python benchmarks/zoo.py --rows new.jsonl --sample 0.1 --against docs/zoo.md

The smallest member of every family of timm, every builder of torchvision for classification, segmentation and
detection, every architecture of transformers with an image-classification, masked- or causal-language-model head, from
a tiny configuration of its own class. Each network has a process of its own, with a limit of memory and time. Rows that
the file has are not measured again; exit code 1 if one of the measured failed, or differs from the page it is compared
with.
"""

import argparse
import ast
import contextlib
import datetime
import functools
import io
import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from zoo_page import COLUMNS, PROBES, Row, cells, cells_of, differing, line, page

import landscape

PACKAGE = str(Path(landscape.__file__).parent)


@functools.cache
def version() -> str:
    """Name the last commit of the measured package, with a plus if it has changed since; without git, its release."""

    def said(*command: str) -> str:
        called = ["git", "-C", PACKAGE, *command, "--", "."]
        return subprocess.run(called, capture_output=True, text=True, check=False).stdout.strip()

    return (
        said("log", "-1", "--format=%h", "--abbrev=8") + "+" * bool(said("status", "--porcelain"))
    ) or landscape.__version__


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("zoo.jsonl"), help="file of rows, one JSON object a line")
    parser.add_argument("--shard", default="1/1", help="K/N: the K-th of N parts of the networks")
    parser.add_argument("--jobs", type=int, default=1, help="networks that are measured at a time")
    parser.add_argument("--only", default="", help="regular expression that a name contains")
    parser.add_argument("--sample", type=float, default=1.0, help="fraction of the networks, drawn from --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=600, help="limit of CPU time of a network")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="limit of memory of a network")
    parser.add_argument(
        "--columns", default=",".join(COLUMNS), help="what is measured of each; another run adds others"
    )
    parser.add_argument("--again", action="store_true", help="measure again what the file has")
    parser.add_argument("--write", type=Path, help="write the table of the rows, and measure nothing")
    parser.add_argument("--against", type=Path, help="page whose cells those of the measured must equal")
    options = parser.parse_args()
    known = read(options.rows)
    written = cells_of(options.against) if options.against else {}
    if options.write:
        options.write.write_text(page(known.values(), len(choose("1/1", "", 1.0, 0))))
        return
    chosen = choose(options.shard, options.only, options.sample, options.seed)
    warm_up(chosen)
    parts = [chosen[i :: options.jobs] for i in range(options.jobs)]
    works = [functools.partial(measure, part, options, known, written) for part in parts]
    others = [forked(work) for work in works[1:]]
    failed = works[0]() + sum(os.waitpid(process, 0)[1] for process in others)
    raise SystemExit(1 if failed else 0)


def forked(work: Callable[[], int]) -> int:
    """Do some work in a fork of this process, which ends with its result; returns the number of the process."""
    if (process := os.fork()) == 0:
        ended = 1
        try:
            ended = work()
        finally:
            os._exit(min(ended, 1))
    return process


def measure(
    chosen: Sequence[str], options: argparse.Namespace, known: Mapping[str, Row], written: Mapping[str, list[str]]
) -> int:
    """Measure networks one after the other and write down their rows; returns how many failed or differ."""
    failed = 0
    for name in chosen:
        columns = [column for column in options.columns.split(",") if options.again or not has(known.get(name), column)]
        if columns:
            member = known.get(name, {}).get("member") or next(iter(written.get(name, ())), "").partition(" (")[2][:-1]
            row = in_process(name, member, columns, options.seconds, options.gigabytes)
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)
            differs = name in written and differing(cells(row), written[name])
            print(*differs or (), sep="\n", end="\n" if differs else "", flush=True)
            failed += fails(row) or bool(differs)
    return failed


def has(row: Row | None, column: str) -> bool:
    return row is not None and ("discovery" not in row or column in row)


def read(path: Path) -> dict[str, Row]:
    """The last row of every network, with columns of earlier ones that it does not have, or has not finished."""
    known: dict[str, Row] = {}
    for row in map(json.loads, path.read_text().splitlines() if path.is_file() else []):
        before = known.get(row["name"], {})
        if "discovery" in row and "discovery" in before:
            unfinished = {column for column in COLUMNS if row.get(column, {}).get("outcome") == "limit"}
            row = before | {key: value for key, value in row.items() if key not in unfinished & before.keys()}
        known[row["name"]] = row
    return known


def choose(shard: str, only: str, sample: float, seed: int) -> list[str]:
    from zoo_networks import names

    everything = [name for name in names() if re.search(only, name)]
    if sample < 1:
        drawn = set(random.Random(seed).sample(everything, max(1, round(sample * len(everything)))))
        everything = [name for name in everything if name in drawn]
    number, _, of = shard.partition("/")
    return everything[int(number) - 1 :: int(of)]


def in_process(name: str, member: str, columns: Sequence[str], seconds: int, gigabytes: float) -> Row:
    """A network's row, measured in a process of its own, forked from this one, which has imported everything."""
    most = int(gigabytes * 2**30)
    with tempfile.TemporaryFile("w+") as said:

        def work() -> int:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
            for part in row_of(name, member, columns):
                said.write(json.dumps(part) + "\n")
                said.flush()
            return 0

        _, status, used = os.wait4(forked(work), 0)
        said.seek(0)
        row: Row = {key: value for part in said for key, value in json.loads(part).items()}
    if not {"discovery", *columns} <= row.keys() and "not_built" not in row:
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        why = f"not finished in {seconds} s" if ended == signal.SIGXCPU else f"ended by signal {ended}"
        stopped = {column: {"outcome": "limit", "said": why, "version": version()} for column in columns}
        row = stopped | row if "discovery" in row else {"name": name, "broken": why}
    cost = round(used.ru_utime + used.ru_stime, 1)
    return {**row, "date": f"{datetime.date.today()}", "version": version(), "seconds": cost}


def warm_up(chosen: Sequence[str]) -> None:
    """Import what the measurements import, in one thread: the processes are forked from this one."""
    import torch
    from torch import nn
    from zoo_networks import made

    torch.set_num_threads(1)
    version()
    ast.parse = functools.cache(ast.parse)  # `inspect` parses a library's module again for each of its classes
    for name in {name.partition("/")[0]: name for name in chosen}.values():  # one of each library
        with contextlib.suppress(Exception):
            made(name)
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    list(measured(network.eval(), lambda n, small=False: (torch.randn(n, 3, 8, 8), torch.arange(n) % 5), COLUMNS))


def row_of(name: str, member: str, columns: Sequence[str]) -> Iterator[Row]:
    """Build one network and measure it, and give the parts of its row; `member` of its family, if it is known."""
    warnings.simplefilter("ignore")
    logging.disable()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from zoo_networks import made

        try:
            member, network, data = made(name, member)
        except Exception as error:  # of the library
            yield {"name": name, "not_built": f"{type(error).__name__}: {first_line(error)}"}
            return
        yield {"name": name, "member": member}
        yield from measured(network.eval(), data, columns)


def measured(network: Any, data: Callable[..., Any], columns: Sequence[str]) -> Iterator[Row]:
    """What works on a network: its layers, and for each probe a number, a refusal or a failure."""
    from landscape.discovery.graph import ATTENTION, few, record
    from landscape.layers.selection import layers_of
    from landscape.products.derivative_check import disagreement
    from landscape.running import run

    yield {"parameters": sum(p.numel() for p in network.parameters())}
    subject: Any = None

    def loaded(samples: int, small: bool = False) -> Any:
        return landscape.load(network, data=data(samples, small), batch_size=samples)

    def layers() -> Row:
        flow = record(network, few(subject.example()[0]), subject.forward)
        several = layers_of(subject, ())
        return {
            "layers": len(several), "kinds": dict(Counter(layer.kind for layer in several)),
            "stages": several[-1].stage, "grids": sum(layer.spatial for layer in several),
            "unknown": [layer.name for layer in several if layer.grid_unknown],
            "attentions": sum(layer.attention is not None for layer in several),
            "attention_calls": sum(o.name in ATTENTION and len(flow.shapes[o.writes[0]]) > 2 for o in flow.operations),
        }  # fmt: skip

    def number(probe: str, quantity: str) -> Row:
        import numpy as np

        result = landscape.measure(probe, subject, out=None, quiet=True)
        if probe == "attention" and not layers_of(subject, ())[0].of_images:
            quantity = "entropy"  # tokens of a text are no pixels
        values = result[quantity]
        others = [dim for dim in values.dims if dim != "layer"]
        finite = values.notnull().any(dim=others).values
        names = result["name"].values if result.get("name") is not None else np.arange(len(finite))
        lost = [str(name) for name, is_finite in zip(names, finite, strict=True) if not is_finite]
        why = result.attrs.get(f"{quantity}_unmeasured", f"not finite in {', '.join(lost)}")
        return {"finite": int(finite.sum()), "of": len(finite), **({"nan": lost, "said": f"{why}"} if lost else {})}

    def lesion() -> Row:
        from landscape.probes import probe_class

        probe = probe_class("lesion")()
        with landscape.subject.loading.load.measuring(subject):
            plan = probe.plan(subject)
            probe.measure(subject, plan.unit((0, plan.shape[1] - 1)))
        return {"units": plan.shape[1], "left_out": plan.facts.get("left_out", "")}

    def hessian() -> Row:
        few = loaded(2, small=True)
        cheap: Any = {"max_products": 2, "verify": False, "hvp": "double-backward", "kinks": "single"}
        with mock.patch.object(run, "disagreement", return_value=""):  # a dozen passes in double precision
            spectrum = landscape.measure("hessian", few, out=None, quiet=True, top=1, **cheap)
        value = float(spectrum["eigenvalue"].mean())
        return {"value": value, **({"said": disagreement(few)} if value != value else {})}

    def load() -> Row:
        nonlocal subject
        subject = loaded(4)
        return {}

    said = outcome(load)
    ways = {probe: functools.partial(number, probe, quantity) for probe, quantity in PROBES.items()}
    ways |= {"discovery": layers, "lesion": lesion, "hessian": hessian}
    for column in ("discovery", *columns):
        yield {column: said if subject is None else outcome(ways[column])}


def outcome(measure: Callable[[], Row]) -> Row:
    """What a measurement gives: a number, "none" (nothing to measure), a refusal of this project, or a failure."""
    from landscape.probe import NotApplicable
    from landscape.products.hessian_product import out_of_memory

    start = time.process_time()
    try:
        found = measure()
        kind = "partial" if found.get("nan") or found.get("value", 0.0) != found.get("value", 0.0) else "number"
    except NotApplicable as error:
        kind, found = "none", {"said": first_line(error)}
    except (ValueError, OSError) as error:
        ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
        kind, found = ("refused", {"said": f"{error}"}) if ours else ("failed", _failure(error))
    except Exception as error:  # whatever else is a fault
        kind, found = ("limit", {"said": "not enough memory"}) if out_of_memory(error) else ("failed", _failure(error))
    return {"outcome": kind, **found, "seconds": round(time.process_time() - start, 1), "version": version()}


def _failure(error: Exception) -> Row:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    where = f"{frames[-1].filename[len(PACKAGE) + 1 :]}:{frames[-1].lineno}" if frames else ""
    return {"said": f"{type(error).__name__}: {first_line(error)}", "at": where}


def first_line(error: Exception) -> str:
    return next(iter(f"{error}".splitlines()), "")[:300]


def fails(row: Row) -> bool:
    return "broken" in row or any(row[column]["outcome"] == "failed" for column in COLUMNS if column in row)


if __name__ == "__main__":
    main()

"""The command `demo`: the shipped study of that name, ending with what it found."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.study import carry_out, illustrate, shipped, study_named, workers_of
from landscape.cli.text_table import text_table
from landscape.options import format_duration
from landscape.probes import PROBES, probe_class
from landscape.reporting.progress import say

if TYPE_CHECKING:
    from landscape.plots.report.findings import Finding

Option = typer.Option
WORKERS = 2  # processes that train, measure and draw: networks as small as these gain nothing by threads
OTHERS: Mapping[str, Mapping[str, Any]] = {  # of `--all`, where the defaults take long or one network is too few
    "perturbation": {"samples": 64},
    "ensemble": {"samples": 512, "networks": ["vit_demo"], "with": ["resnet_demo", "alternet_demo"]},
    "attack": {"samples": 128, "eps": "1/255,4/255,16/255", "steps": 10},
    "input-surface": {"samples": 64, "resolution": 11},
    "corruption": {"samples": 128, "severities": "1,3,5"},
}
SENTENCES = 3
OWN = "landscape hessian weights.pt --model mine.py:model --data mine.py:data"


def demo(
    out: Annotated[Path, Option(help="folder for checkpoints, results, figures and report")] = Path("."),
    all: Annotated[bool, Option("--all", help="run every probe and draw every figure, in several minutes")] = False,
    epochs: Annotated[int | None, Option(help="epochs per model; default: those of the study's file")] = None,
    samples: Annotated[int, Option(help="samples per probe, at most")] = 1024,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a ViT, a ResNet and an AlterNet on digits, run the core probes, draw 16 figures: two to three minutes.

    Finished steps are kept and not repeated.
    """
    from landscape.plots import report
    from landscape.results.declared_size import toml_of

    start, results = monotonic(), out / "results.h5"
    measure = toml_of(shipped()["demo"])["measure"]
    measure |= dict(others(measure, quiet=quiet)) if all else {}
    changes: dict[str, Any] = {"train": {} if epochs is None else {"epochs": epochs}}
    changes |= {"figures": []} if all else {}
    changes["measure"] = {name: {**of, "samples": min(samples, of["samples"])} for name, of in measure.items()}
    study = study_named("demo", **changes)
    with workers_of(study, WORKERS, device=device) as workers:
        found = carry_out(study, out, **workers, device=device, quiet=quiet)
        illustrate(study, found, results, workers["each"], WORKERS, quiet=quiet)
    typer.echo(text_table(report.summary_table(results)))
    typer.echo(closing(report.findings_of(results), out))
    say(f"{format_duration(monotonic() - start)} in all", quiet=quiet)


def others(core: Iterable[str], *, quiet: bool = True) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is measured beside some probes: all but those of an order of frames, which digits do not have."""
    for name in (name for name in PROBES if name not in core and not probe_class(name).ordered):
        if (needed := PROBES[name].needs) and find_spec(needed) is None:
            say(f"{name}: left out, as {needed} is not installed", quiet=quiet)
        else:
            yield name, OTHERS.get(name, {"samples": 512})


def closing(found: Iterable[Finding], out: Path) -> str:
    """What was found, in sentences with numbers, and the commands to type next."""
    sentences = [finding.number for finding in found if finding.number][:SENTENCES]
    compare, every = (
        ["landscape", "compare", str(out / "results.h5")],
        ["landscape", "demo", "--out", str(out), "--all"],
    )
    commands = [shlex.join(compare), shlex.join(every), OWN]
    lines = ["", "Found (in brackets and after ±: 95 % intervals):", *(f"- {line}" for line in sentences)]
    return "\n".join([*lines, "", "Next:", *(f"$ {command}" for command in commands)])

"""The command `smoothing`: a checkpoint with and without smoothing blocks, by the probes that show their effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from landscape.cli.command_options import OWN, RUN, loading_options, loading_values, option, with_options
from landscape.cli.loading import CHECKPOINT, load
from landscape.cli.measuring import measure_all
from landscape.cli.text_table import text_table
from landscape.options import OptionError, at_least, invalid
from landscape.progress import say


def smoothing(
    checkpoint: Path | None, sizes: str, batches: int, out: Path, figures: Path, quiet: bool, **options: Any
) -> None:
    """Compare a checkpoint with and without smoothing blocks: scores over ensemble sizes, features and curvature.

    Measures calibration for every ensemble size (of a network with dropout; else the network alone), fourier,
    uncertainty and a few mini-batches of hessian, each twice, into one results file. What the file holds is not
    measured again.
    """
    from landscape.plots import drawing, smoothing_study

    counts = _sizes(sizes)
    at_least("batches", batches, 1)
    values = loading_values(options)
    with_blocks = {**values, "smooth": True}
    without = {key: value for key, value in values.items() if key not in ("smooth_at", "smooth_block")}
    networks = {"without smoothing": {**without, "smooth": False}, "with smoothing": with_blocks}
    members = _members(checkpoint, with_blocks, counts, quiet=quiet)
    for probe, parameters, count in _runs(members, batches):
        for name, loading in networks.items():
            drawn = f", {count} dropout mask{'s' if count > 1 else ''}" if count else ""
            say(f"{probe} {name}{drawn}", quiet=quiet)
            measure_all(probe, [checkpoint], parameters, {**loading, "mc_dropout": count}, out=out, quiet=True)
    for rows in smoothing_study.tables(out):
        typer.echo(text_table(rows))
    for path in drawing.draw_studies(out, figures, names=("smoothing",)):
        typer.echo(path)


def _sizes(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise invalid("sizes", text, "numbers of dropout masks such as 1,2,5,10") from None
    if counts[0] < 1:
        raise OptionError(f"--sizes must be at least 1, got {counts[0]}; the network without dropout comes by itself")
    return counts


def _members(checkpoint: Path | None, values: dict[str, Any], counts: list[int], *, quiet: bool) -> list[int]:
    """The ensemble sizes that the network allows, 0 for the network as it is where that is deterministic.

    Raises:
        ValueError: the network has no stages, or draws random numbers that no mask freezes.
    """
    from landscape.subject.checks import refuse_stochastic, variation
    from landscape.subject.members import calls_of

    subject = load(checkpoint, values, quiet=quiet)
    stochastic = bool(variation(subject))
    if not any(call.rate for call in calls_of(subject)):
        refuse_stochastic(subject)
        say("note: the network has no dropout, so that there is no ensemble of it", quiet=quiet)
        return [0]
    return counts if stochastic else [0, *counts]


def _runs(members: list[int], batches: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Probe, its parameters, and number of dropout masks of every pair of runs."""
    yield from (("calibration", {}, count) for count in members)
    yield "fourier", {"spectrum": "diagonal"}, members[-1]
    yield "uncertainty", {}, members[-1]
    yield "hessian", {"batches": batches}, members[0]


with_options(
    smoothing,
    {
        "checkpoint": CHECKPOINT,
        "sizes": option(str, "numbers of dropout masks whose probabilities are averaged", "1,2,3,5,10", OWN),
        "batches": option(int, "mini-batches of hessian", 4, OWN),
        **loading_options({}, without=("smooth", "mc_dropout")),
        "out": RUN["out"],
        "figures": option(Path, "folder for the figure", Path("figures"), OWN),
        "quiet": RUN["quiet"],
        "verbose": RUN["verbose"],
        "debug": RUN["debug"],
    },
)

"""The command `heads`: surfaces and spectra of several networks, deterministic and with dropout masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.command_options import OWN, RUN, loading_options, loading_values, option, with_options
from landscape.cli.loading import load
from landscape.cli.measuring import measure_all
from landscape.options import at_least
from landscape.progress import say


def heads(
    checkpoint: list[Path] | None, masks: int, resolution: str, batches: int, out: Path, figures: Path, quiet: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Surfaces and Hessian spectra of networks side by side, deterministic and with dropout masks, in one figure.

    Such as an MLP head, average pooling, and average pooling with smoothing blocks. Measures surface and hessian of
    every network, twice where it has dropout, into one results file, and draws all networks of that file: with --smooth
    a second run adds a network with blocks that are inserted. What the file holds is not measured again.
    """
    from landscape.plots import drawing

    at_least("masks", masks, 1)
    at_least("batches", batches, 1)
    values = loading_values(options)
    paths: list[Path | None] = [*(checkpoint or [])]
    measured = 0
    for path in paths or [None]:
        for words, loading in _kinds(path, values, masks, quiet=quiet):
            for probe, parameters in (("surface", {"resolution": resolution}), ("hessian", {"batches": batches})):
                say(f"{probe} {words}", quiet=quiet)
                measure_all(probe, [path], parameters, loading, out=out, quiet=True)
                measured += 1
    if not measured:
        raise ValueError(
            "nothing to measure: the networks draw random numbers in evaluation, and not by dropout that masks could "
            "freeze; give a network with dropout, or a deterministic one"
        )
    drawn = drawing.draw_studies(out, figures, names=("heads",))
    for file in drawn:
        typer.echo(file)
    if not drawn:
        say(f"no figure yet: {out} needs two networks, one of them with dropout; run it on another one", quiet=quiet)


def _kinds(
    path: Path | None, values: Mapping[str, Any], masks: int, *, quiet: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is measured of a network, in words and as loading options: without its dropout, and with frozen masks."""
    from landscape import models
    from landscape.subject.checks import variation
    from landscape.subject.members import calls_of

    subject = load(path, dict(values), quiet=quiet)
    drops = any(call.rate for call in calls_of(subject))
    stored = subject.checkpoint
    if not variation(subject):
        yield f"{subject.label}, deterministic", {**values, "mc_dropout": 0}
    elif stored is not None and stored.native and "mc_dropout" in models.accepts(stored.model):  # dropout at test time
        without = {**values.get("model_arg", {}), "mc_dropout": 0}
        yield f"{subject.label}, deterministic", {**values, "model_arg": without, "mc_dropout": 0}
    else:
        say(
            f"note: {subject.label} draws random numbers in evaluation, so that there is no deterministic one",
            quiet=quiet,
        )
    if drops:
        yield f"{subject.label}, {masks} dropout masks", {**values, "mc_dropout": masks}
    else:
        say(f"note: {subject.label} has no dropout, so that there are no masks of it", quiet=quiet)


with_options(
    heads,
    {
        "checkpoint": (
            Annotated[
                list[Path] | None,
                typer.Argument(help="networks, or their run folders; default: the newest under ./checkpoints"),
            ],
            None,
        ),
        "masks": option(int, "dropout masks whose predictions are averaged", 5, OWN),
        "resolution": option(str, "points per axis of the surfaces", "11", OWN),
        "batches": option(int, "mini-batches of hessian", 4, OWN),
        **loading_options({}, without=("mc_dropout",)),
        "out": RUN["out"],
        "figures": option(Path, "folder for the figure", Path("figures"), OWN),
        "quiet": RUN["quiet"],
        "verbose": RUN["verbose"],
        "debug": RUN["debug"],
    },
)

"""The command `sweep`: networks that differ in one argument, in one table and one figure (Park & Kim 2022, Fig. 7a)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.command_options import OWN, RUN, loading_options, loading_values, option, with_options
from landscape.cli.measuring import measure_all
from landscape.cli.text_table import text_table
from landscape.options import at_least
from landscape.progress import say


def sweep(checkpoint: list[Path], batches: int, out: Path, figures: Path, quiet: bool, **options: Any) -> None:
    """Compare networks that differ in one argument, such as the kernel or patch size or the number of heads.

    Measures calibration on the test and on the train split, and a few mini-batches of hessian, of every network into
    one results file; draws accuracy, error against training NLL and curvature over the argument. Networks with other
    seeds are drawn as runs of the same value. What the file holds is not measured again.
    """
    from landscape.plots import drawing, sweep_study
    from landscape.results import reader

    at_least("batches", batches, 1)
    values = loading_values(options)
    parts: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("calibration", {}, {"split": "test"}), ("calibration", {}, {"split": "train"}),
        ("hessian", {"batches": batches}, {}),
    ]  # fmt: skip
    for probe, parameters, split in parts:
        say(f"{probe}{' on the ' if split else ''}{split.get('split', '')}{' split' * bool(split)}", quiet=quiet)
        measure_all(probe, checkpoint, parameters, {**values, **split}, out=out, quiet=True)
    stored = reader.groups(out)
    found = sweep_study.studies(stored)
    for study in found:
        typer.echo(text_table(sweep_study.table(study)))
    for path in drawing.draw_studies(out, figures, names=("sweep",)):
        typer.echo(path)
    if not found:
        labels = ", ".join(dict.fromkeys(str(data.attrs["label"]) for _, data in stored))
        raise ValueError(
            f"no sweep in {out}: it holds {labels}, expected networks that landscape train wrote, with "
            f"{sweep_study.FEWEST} values of one argument and all others equal; run it with those that are missing"
        )


with_options(
    sweep,
    {
        "checkpoint": (Annotated[list[Path], typer.Argument(help="trained networks, or their run folders")], ...),
        "batches": option(int, "mini-batches of hessian", 4, OWN),
        **loading_options({}, without=("split",)),
        "out": RUN["out"],
        "figures": option(Path, "folder for the figure", Path("figures"), OWN),
        "quiet": RUN["quiet"],
        "verbose": RUN["verbose"],
        "debug": RUN["debug"],
    },
)

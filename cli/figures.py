"""The commands `plot` and `report`: figures of a results file or a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.damaged_files import check_not_damaged
from landscape.progress import say

Option = typer.Option


def plot(
    file: Annotated[Path, typer.Argument(help="results file, or the folder of a training run")] = Path("results.h5"),
    out: Annotated[Path, Option(help="folder for the figures")] = Path("figures"),
    format: Annotated[str, Option(help="any of png, pdf, svg, separated by commas")] = "png",
    eigenvalues: Annotated[
        str, Option(help="axis range of the Hessian spectra; default: from the data", metavar="LOW:HIGH")
    ] = "",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw every figure that the results allow; for the folder of a training run, its loss and accuracy."""
    from landscape.options import parse_choices

    formats = parse_choices("format", format, ("png", "pdf", "svg"))
    if file.is_dir():
        from landscape.plots import drawing

        paths = drawing.draw_run(file, out, formats)
    else:
        paths = draw(file, out, formats, eigenvalues=parse_eigenvalues(eigenvalues), quiet=quiet)
    for path in paths:
        typer.echo(path)


def report(
    file: Annotated[Path, typer.Argument(help="results file")] = Path("results.h5"),
    out: Annotated[Path, Option(help="page to write")] = Path("report.html"),
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page with every figure, its protocol, and a table of all checkpoints."""
    from tempfile import TemporaryDirectory

    from landscape.plots.report import report as write_report

    with TemporaryDirectory() as folder:
        typer.echo(write_report(file, out, draw(file, Path(folder), ("png",), quiet=True)))


def parse_eigenvalues(text: str) -> tuple[float, float] | None:
    """Parse `LOW:HIGH` with zero in between; None if empty.

    Raises:
        OptionError: it is something else.
    """
    from landscape.options import parse_range, require

    if not text:
        return None
    expected = "LOW:HIGH around zero, for example -120:900"
    low, high = parse_range("eigenvalues", text, expected)
    require(":" in text and low < 0 < high, "eigenvalues", text, expected)
    return low, high


def draw(
    file: Path, out: Path, formats: tuple[str, ...], *, eigenvalues: tuple[float, float] | None = None, quiet: bool
) -> list[Path]:
    """Draw every figure of a results file into a folder; return the files written.

    Raises:
        ValueError: nothing finished to draw.
    """
    from landscape.plots import drawing

    check_not_damaged(file)
    paths = drawing.draw(file, out, formats=formats, eigenvalues=eigenvalues)
    if not paths:
        raise ValueError(f"{file} holds nothing finished to draw; run a probe first, for example: landscape surface")
    say(f"{len(paths)} figure{'s' if len(paths) > 1 else ''} in {out}", quiet=quiet)
    return paths

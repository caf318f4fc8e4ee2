"""Commands that look at files: plot, report, show."""

from __future__ import annotations

import contextlib
import json as encoding
import math
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.progress import say

HASHED = 2**28  # bytes of a checkpoint up to which `show` reads all of it for its digest
Option = typer.Option
File = Annotated[Path, typer.Argument(help="results file")]
Drawable = Annotated[Path, typer.Argument(help="results file, or the folder of a training run")]


def plot(
    file: Drawable = Path("results.h5"),
    out: Annotated[Path, Option(help="Folder for the figures.")] = Path("figures"),
    format: Annotated[str, Option(help="Any of png, pdf, svg, separated by commas.")] = "png",
    eigenvalues: Annotated[
        str, Option(help="LOW:HIGH of the figure of Hessian spectra; the paper has -120:900.", metavar="LOW:HIGH")
    ] = "",
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Draw every figure that the results allow; of a run folder its loss and accuracy."""
    from landscape.options import parse_choices

    formats = parse_choices("format", format, ("png", "pdf", "svg"))
    if file.is_dir():
        from landscape.plots import drawing

        for path in drawing.draw_run(file, out, formats):
            typer.echo(path)
        return
    for path in drawn(file, out, formats, eigenvalues=range_of(eigenvalues), quiet=quiet):
        typer.echo(path)


def report(
    file: File = Path("results.h5"),
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Write one page with every figure, the summary table and each protocol."""
    from tempfile import TemporaryDirectory

    from landscape.plots import report as page

    with TemporaryDirectory() as folder:
        typer.echo(page.report(file, out, drawn(file, Path(folder), ("png",), quiet=True)))


def range_of(text: str) -> tuple[float, float] | None:
    """`LOW:HIGH` with zero between them, None for nothing.

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


def drawn(
    file: Path,
    out: Path,
    formats: tuple[str, ...],
    *,
    eigenvalues: tuple[float, float] | None = None,
    quiet: bool,
) -> list[Path]:
    """Draw into a folder.

    Raises:
        ValueError: there is nothing finished to draw.
    """
    from landscape.plots import drawing

    survives(file)
    paths = drawing.draw(file, out, formats=formats, eigenvalues=eigenvalues)
    if not paths:
        raise ValueError(f"{file} holds nothing finished to draw; run a probe first, for example: landscape surface")
    say(f"{len(paths)} figures in {out}", quiet=quiet)
    return paths


def show(
    file: Annotated[Path, typer.Argument(help="checkpoint or results file")],
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Tell what a checkpoint or a results file holds."""
    from landscape.checkpoints import file_formats

    if not file.exists():
        raise FileNotFoundError(f"no file at {file}; give a checkpoint or a results file")
    if file.is_dir() and not file_formats.holds_weights(file):
        raise ValueError(f"{file} is a folder; give a checkpoint in it, or a results file")
    rows = _results(file) if file.is_file() and _is_hdf5(file) else _checkpoint(file)
    if json:
        typer.echo(encoding.dumps(rows, default=str))
    elif isinstance(rows, dict):
        width = max(map(len, rows))
        for name, value in rows.items():
            typer.echo(f"{name:{width}}  {printable(value)}")
    else:
        typer.echo(table(rows))


def printable(value: Any) -> str:
    """A value from a file as text that cannot steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with common keys as aligned text under a header."""
    if not rows:
        return "(empty)"
    cells = [list(rows[0]), *([printable(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def survives(file: Path) -> None:
    """Read a results file once in a child of this process, because HDF5 itself may crash on damaged bytes.

    Only where the process has no other threads, which a child would lose: as in commands that look, without torch.

    Raises:
        ValueError: the child died of it.
    """
    if not file.is_file() or "torch" in sys.modules or threading.active_count() > 1:
        return
    from landscape.results import reader

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):  # the parent comes to the same error and says it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            reader.groups(file)
        os._exit(0)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        raise ValueError(f"{file} is damaged (HDF5 crashes on it); move it away and measure again")


def _is_hdf5(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(8) == b"\x89HDF\r\n\x1a\n"


def _results(file: Path) -> list[dict[str, Any]]:
    from landscape.plots import headlines

    survives(file)
    return headlines.summary(file)


def _checkpoint(file: Path) -> dict[str, Any]:
    """From the outline alone: no tensor is loaded, and torch is not imported."""
    from landscape.checkpoints import containers, file_formats, file_kinds
    from landscape.checkpoints.outline import refusal

    files = file_formats.files_of(file)
    size = sum(part.stat().st_size for part in files)
    rows = {
        "file": str(file),
        "sha256": file_formats.sha256_of(file) if size <= HASHED else f"not computed of {size:,} bytes; sha256sum does",
    }
    kind = file_kinds.kind_of(files[0])
    if kind.program:
        return rows | {"weights": f"in a {kind.name} program, which runs code to load: give probes --trust-pickle"}
    found = file_kinds.outline_of(file)
    if found.wanted:
        raise refusal(file, found.wanted)
    try:
        native = containers.is_native(found.content)
        held = containers.weights_in(found.content, "raw")
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None
    numbers = sum(entry.numel() for entry in held.weights.values())
    also = f", beside {', '.join(held.others)}" if held.others else ""
    about = {
        key: found.content.get(key) for key in ("model_args", "data", "recipe", "epoch", "metrics", "seed", "versions")
    }
    own = found.content["model"] if native else ""
    named = containers.architecture_in(found.content) or "not said"
    return {
        **rows,
        "weights": f"{len(held.weights)} tensors, {numbers:,} numbers ({held.taken}{also})",
        "model": own or f"{named}: name it with --model",
        **(about if native else {"epoch": found.content.get("epoch", math.nan)}),
    }

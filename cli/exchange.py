"""Commands that take surfaces from other tools and give them to them: import, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from landscape.cli.files import survives
from landscape.cli.progress import say

Option = typer.Option


def import_(
    files: Annotated[list[Path], typer.Argument(help="surfaces: tomgoldstein HDF5, or published CSV", metavar="FILE")],
    out: Annotated[Path, Option(help="Results file.")] = Path("results.h5"),
    label: Annotated[list[str], Option(help="Name in the results file, one per file; repeatable.")] = [],  # noqa: B006
    weight_decay: Annotated[
        float, Option(min=0.0, help="Of a CSV's objective, loss + weight decay x l2; as published by default.")
    ] = 0.05,
    path: Annotated[Path | None, Option(help="Projection file of loss-landscape: the path of a run over FILE.")] = None,
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Take surfaces of tomgoldstein/loss-landscape (HDF5) or of how-do-vits-work (CSV) into a results file."""
    from landscape.exchange import importing
    from landscape.options import OptionError
    from landscape.plots import headlines
    from landscape.results import hdf5_file
    from landscape.run import reduce_of

    if label and len(label) != len(files):
        raise OptionError(f"--label was given {len(label)} times for {len(files)} files; give one each")
    if path is not None and len(files) != 1:
        raise OptionError(f"--path belongs to one surface, {len(files)} files were given; import them one by one")
    hdf5_file.check(out, writable=True)
    for file in files:
        importing.read(file, course=path)  # all of them, before the first is stored
    for i, file in enumerate(files):
        name = label[i] if label else ""
        for found in importing.import_file(
            file, out, label=name, weight_decay=weight_decay, course=path, reduce_of=reduce_of
        ):
            said = f"{found.measured} of {found.units} points" if found.measured else "was there already"
            say(f"{found.group} in {out}: {said}. {headlines.headline(out, found.group)}", quiet=quiet)


def export(
    file: Annotated[Path, typer.Argument(help="results file")] = Path("results.h5"),
    format: Annotated[str, Option(help="Any of tomgoldstein (HDF5), csv, vtp, vtk, separated by commas.")] = "vtp",
    out: Annotated[Path, Option(help="Folder for the files.")] = Path("exported"),
    label: Annotated[str | None, Option(help="Only answers of this label.")] = None,
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Write surfaces, lines and paths for other tools: ParaView (vtp, vtk), tomgoldstein/loss-landscape (HDF5), CSV."""
    from landscape.exchange import exporting
    from landscape.options import parse_choices

    survives(file)
    formats = parse_choices("format", format, exporting.WRITERS)
    paths = exporting.export(file, out, formats, label=label)
    for path in paths:
        typer.echo(path)
    say(f"{len(paths)} files in {out}", quiet=quiet)

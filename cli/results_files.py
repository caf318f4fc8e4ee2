"""The commands on results files: `import`, `export`, `cite`, `merge` and `repair`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli import command_options, damaged_files
from landscape.cli.process_setup import importing
from landscape.options import counted
from landscape.reporting.progress import say

Option = typer.Option


def import_(
    files: Annotated[list[Path], typer.Argument(help="tomgoldstein HDF5, or published CSV", metavar="FILE")],
    out: Annotated[Path, Option(help="results file")] = Path("results.h5"),
    label: Annotated[list[str], Option(help="name in the results file, one per file; repeatable")] = [],  # noqa: B006
    weight_decay: Annotated[
        float, Option(min=0.0, help="for the objective of a CSV, loss + weight decay x l2; default: as published")
    ] = 0.05,
    path: Annotated[Path | None, Option(help="projection file of loss-landscape: a run's path over FILE")] = None,
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Import surfaces of loss-landscape (HDF5) or how-do-vits-work (CSV), and tables, into a results file.

    Tables are *_corrupted.csv of spatial-smoothing, or accuracies over the weight of a contrastive objective: a CSV
    with the columns weight, linear_accuracy, fine_tuning_accuracy and the like.
    """
    from landscape.exchange import csv_files, importing
    from landscape.options import OptionError
    from landscape.plots import headlines
    from landscape.results import hdf5_file
    from landscape.running.run import reduce_of

    if label and len(label) != len(files):
        raise OptionError(f"--label must be given once per file ({len(files)}), got {len(label)}")
    if path is not None and len(files) != 1:
        raise OptionError(f"--path belongs to one surface, got {len(files)} files; import them one by one")
    hdf5_file.check(out, writable=True)
    for file in files:
        if csv_files.table_in(file) is None:  # all of them, before the first is stored
            importing.read(file, trajectory=path)
    how: Any = dict(weight_decay=weight_decay, trajectory=path, reduce_of=reduce_of)
    for file, name in zip(files, label or [""] * len(files), strict=True):
        for found in importing.import_file(file, out, label=name, **how):
            points = f"{found.measured} of {counted(found.units, 'point')}" if found.measured else "already imported"
            say(f"{found.group} in {out}: {points}. {headlines.headline(out, found.group)}", quiet=quiet)


def cite(
    file: Annotated[Path, typer.Argument(help="results file")] = Path("results.h5"),
    debug: command_options.Debug = False,
) -> None:
    """Print a paragraph of methods and the BibTeX of what was measured; BibTeX can read the whole output."""
    from landscape.results import reader
    from landscape.studies.citation import methods_and_sources

    damaged_files.check_not_damaged(file)
    with reader.streaming(file) as stored:
        typer.echo(methods_and_sources([data for _, data in stored]), nl=False)


def export(
    file: Annotated[Path, typer.Argument(help="results file")] = Path("results.h5"),
    format: Annotated[
        str, Option(help="any of tomgoldstein (HDF5), csv, vtp (ParaView), separated by commas; or bits (JSON)")
    ] = "vtp",
    out: Annotated[Path, Option(help="folder for the files")] = Path("exported"),
    label: Annotated[str | None, Option(help="only results with this label")] = None,
    budget: Annotated[str, Option(help="of bits: mean bits per weight such as 4.5, or a size such as 12MB")] = "",
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Export surfaces, lines and paths to other tools: ParaView (vtp), tomgoldstein/loss-landscape (HDF5), CSV.

    The format bits writes the bit-width of every unit under a budget, from results of sensitivity.
    """
    from landscape.exchange import bit_tables, exporting
    from landscape.options import OptionError, parse_choices

    damaged_files.check_not_damaged(file)
    if (format.strip().lower() == "bits") != bool(budget):
        raise OptionError("--format bits and --budget belong together; give both, such as --format bits --budget 4")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder; give another --out")
    if budget:
        paths = bit_tables.export_bit_tables(file, out, budget, label=label)
    else:
        paths = exporting.export(file, out, parse_choices("format", format, exporting.WRITERS), label=label)
    for path in paths:
        typer.echo(path)
    say(f"{counted(len(paths), 'file')} in {out}", quiet=quiet)


def merge(
    files: Annotated[list[Path], typer.Argument(help="results files, such as those of shards", metavar="FILE")],
    out: Annotated[Path, Option(help="results file to write, or to add to; may be one of the files")],
    prefer: Annotated[Path | None, Option(help="where values differ, take those of this file")] = None,
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Join results files: keep every result, and combine the units of equal measurements."""
    for line in damaged_files.in_child(lambda: _merged(files, out, prefer), files):
        say(line, quiet=quiet)
    typer.echo(out)


def _merged(files: list[Path], out: Path, prefer: Path | None) -> list[str]:
    with importing():
        from landscape.results import group as groups
        from landscape.results.merging import merge_files
        from landscape.results.run_key import command_for
        from landscape.running.run import reduce_of

    lines = []
    merged = merge_files(files, out, reduce_of=reduce_of, prefer=prefer)
    about = {result.group: groups.attributes(out, result.group) for result in merged}
    for result in merged:
        units = f"{result.done:,} of {counted(result.units, 'unit', ',')} from {counted(result.files, 'file')}"
        lines.append(f"{result.group} in {out}: {units}")
        if missing := result.units - result.done:
            mine = about[result.group]
            if any(_replaced_by(mine, other) for other in about.values()):
                advice = f"; {mine['label']} is another checkpoint since: only its older file can finish them"
            else:
                command = command_for(mine, out)
                advice = command and f"; finish with: {command}"
            lines.append(f"  {counted(missing, 'unit', ',')} missing{advice}")
    return lines


def _replaced_by(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether another result asks the same of a later file of the same name."""
    same = all(mine.get(name) == other.get(name) for name in ("probe", "label", "parameters"))
    weights = [about.get("checkpoint_sha256", "") for about in (mine, other)]
    return same and all(weights) and weights[0] != weights[1] and str(mine["created"]) < str(other["created"])


def repair(
    file: Annotated[Path, typer.Argument(help="damaged results file")],
    out: Annotated[Path | None, Option(help="new results file; default: FILE.repaired.h5")] = None,
    quiet: command_options.Quiet = False,
    debug: command_options.Debug = False,
) -> None:
    """Write every intact result of a damaged results file into a new one, and say what is gone."""
    from landscape.results.repair import repair as recover

    out = out or file.with_name(f"{file.stem}.repaired.h5")
    found = recover(file, out, progress=lambda said: say(said, quiet=quiet))
    if not found.gone:
        say(f"nothing to repair: {counted(len(found.kept), 'result')} of {file}, all intact", quiet=quiet)
        return
    for name in found.kept:
        say(f"{name} in {out}: recovered", quiet=quiet)
    for lost in found.gone:
        say(f"gone: {lost}")
    typer.echo(out)

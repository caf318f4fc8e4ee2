"""The commands `merge` and `repair`, which write results files from others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet
from landscape.cli.damaged_files import in_child
from landscape.cli.process_setup import importing
from landscape.reporting.progress import say

Option = typer.Option


def merge(
    files: Annotated[list[Path], typer.Argument(help="results files, such as those of shards", metavar="FILE")],
    out: Annotated[Path, Option(help="results file to write, or to add to; may be one of the files")],
    prefer: Annotated[Path | None, Option(help="where values differ, take those of this file")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Join results files: every result of each, and of results to the same question the units of all."""
    for line in in_child(lambda: _merged(files, out, prefer), files):
        say(line, quiet=quiet)
    typer.echo(out)


def _merged(files: list[Path], out: Path, prefer: Path | None) -> list[str]:
    """Merge the files; what to say about every result."""
    with importing():
        from landscape.results import group as groups
        from landscape.results.command_line import command_for
        from landscape.results.merging import merge_files
        from landscape.running.run import reduce_of

    lines = []
    merged = merge_files(files, out, reduce_of=reduce_of, prefer=prefer)
    about = {result.group: groups.attributes(out, result.group) for result in merged}
    for result in merged:
        units = f"{result.done:,} of {result.units:,} units from {result.files} file{'s' if result.files > 1 else ''}"
        lines.append(f"{result.group} in {out}: {units}")
        if missing := result.units - result.done:
            mine = about[result.group]
            if any(_replaced_by(mine, other) for other in about.values()):
                advice = f"; {mine['label']} is another checkpoint since: only its older file can finish them"
            else:
                command = command_for(mine, out)
                advice = command and f"; finish with: {command}"
            lines.append(f"  {missing:,} units are missing{advice}")
    return lines


def _replaced_by(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether another result asks the same of a later file of the same name."""
    same = all(mine.get(name) == other.get(name) for name in ("probe", "label", "parameters"))
    weights = [about.get("checkpoint_sha256", "") for about in (mine, other)]
    return same and all(weights) and weights[0] != weights[1] and str(mine["created"]) < str(other["created"])


def repair(
    file: Annotated[Path, typer.Argument(help="damaged results file")],
    out: Annotated[Path | None, Option(help="new results file; default: FILE.repaired.h5")] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write every intact result of a damaged results file into a new one, and say what is gone."""
    from landscape.results.repair import repair as recover

    out = out or file.with_name(f"{file.stem}.repaired.h5")
    found = recover(file, out, progress=lambda said: say(said, quiet=quiet))
    if not found.gone:
        say(f"nothing to repair: all {len(found.kept)} results of {file} are intact", quiet=quiet)
        return
    for name in found.kept:
        say(f"{name} in {out}: recovered", quiet=quiet)
    for lost in found.gone:
        say(f"gone: {lost}")
    typer.echo(out)

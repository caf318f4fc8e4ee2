"""Print what a results file still lacks with the commands that finish it, and follow its progress."""

import json
import time
from pathlib import Path

import typer

from landscape.options import format_duration, printable
from landscape.results.command_line import command_for

POLL_SECONDS = 2.0  # between two looks at a file that is followed


def show_pending(file: Path, *, as_json: bool) -> None:
    """Print every unfinished result: how many units it lacks, which ones, and the command that measures them."""
    from landscape.results.remaining_units import standings

    rows = []
    found = standings(file)
    for result in found:
        if lacks := result.done.size - result.finished:
            row = {"group": result.group, "units": result.done.size, "missing": lacks, "which": result.missing()}
            rows.append({**row, "running": result.running, "command": command_for(result.attributes, file)})
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        typer.echo(f"nothing is missing; finished results: {len(found)}")
    for row in () if as_json else rows:
        now = ", being measured now" if row["running"] else ""
        units = f"{row['missing']:,} of {row['units']:,} units missing ({row['which']}){now}"
        typer.echo(f"{printable(row['group'])}: {units}")
        typer.echo(f"  {printable(row['command'] or 'no command measures it')}")


def follow(file: Path, *, as_json: bool) -> None:
    """Print the progress of every result when it changes, until all are finished."""
    from landscape.results.remaining_units import standings

    first: dict[str, tuple[float, int]] = {}
    last: dict[str, int] = {}
    while True:
        found, now = standings(file), time.monotonic()
        for result in found:
            start, before = first.setdefault(result.group, (now, result.finished))
            if last.get(result.group) == result.finished:
                continue
            last[result.group] = result.finished
            rate = (result.finished - before) / max(now - start, 1e-9)
            row = {"group": result.group, "finished": result.finished, "units": result.done.size, "rate": rate}
            left = f", {rate:.3g}/s, about {_duration(result.done.size - result.finished, rate)} left"
            text = f"{printable(result.group)} {result.finished:,}/{result.done.size:,}"
            typer.echo(json.dumps(row) if as_json else text + (left if rate and not result.done.all() else ""))
        if all(result.done.all() for result in found):
            return
        time.sleep(POLL_SECONDS)


def _duration(units: int, rate: float) -> str:
    return format_duration(units / rate) if rate else ""

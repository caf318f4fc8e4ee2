"""The command `show`: print what a checkpoint or a results file holds; torch is loaded only to load a checkpoint."""

import json as encoding
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli import damaged_files, doctor, loading
from landscape.cli.command_options import OUTPUT, RUN, loading_options, loading_values, option, with_options
from landscape.options import OptionError, counted, format_duration, printable
from landscape.reporting.progress import text_table
from landscape.results.run_key import command_for

HASHED = 2**28  # bytes of a checkpoint up to which it is read whole for its digest


def show(file: Path, json: bool, pending: bool, follow: bool, budget: str, **options: Any) -> None:
    """Show what a checkpoint or a results file holds, without loading it.

    With --model, --data or another loading option a checkpoint is loaded too, as `evaluate` and `layers` do.
    """
    from landscape.checkpoints import raw_files

    if pending or follow:
        if file.is_file() and not _is_hdf5(file):
            name = "pending" if pending else "follow"
            raise OptionError(f"--{name} is for results files, and {file} is none; give one, or leave it out")
        damaged_files.check_not_damaged(file)
        (show_pending if pending else follow_file)(file, as_json=json)
        return
    if not file.exists():
        raise FileNotFoundError(f"no file at {file}; give a checkpoint or a results file")
    if budget:
        _show_bit_tables(file, budget, as_json=json)
        return
    if file.is_dir() and not raw_files.holds_weights(file):
        raise ValueError(f"{file} is a folder; give a checkpoint in it, or a results file")
    values = loading_values(options)
    given = [name for name, (_, default) in LOADING.items() if options[name] != default]
    said = ""
    if file.is_file() and _is_hdf5(file):
        if given:
            name = given[0].replace("_", "-")
            raise OptionError(f"--{name} loads a checkpoint, and {file} is an HDF5 file of results; leave it out")
        content: list[dict[str, Any]] | dict[str, Any]
        content, said = _results(file, numbers=json)
    else:
        held = {"file": str(file)} if values.get("trust_pickle") else _checkpoint(file)
        content = held | (_loaded(file, values) if given else {})
    if json:
        typer.echo(encoding.dumps(content, default=str))
    elif isinstance(content, dict):
        width = max(map(len, content))
        for name, value in content.items():
            typer.echo(f"{name:{width}}  {printable(value)}")
    else:
        typer.echo(text_table(content))
        for line in _in_journals(file, content):
            typer.echo(printable(line))
        if said:
            typer.echo(printable(said))


def _show_bit_tables(file: Path, budget: str, *, as_json: bool) -> None:
    """The bit-widths of every result of `sensitivity`, and what they are expected to cost."""
    from landscape.exchange.bit_tables import bit_tables

    if not file.is_file() or not _is_hdf5(file):
        raise OptionError(f"--budget is for results files, and {file} is none; give one, or leave it out")
    damaged_files.check_not_damaged(file)
    tables = bit_tables(file, budget)
    if as_json:
        typer.echo(encoding.dumps([{"group": group, **table.as_json()} for group, table in tables]))
        return
    for group, table in tables:
        typer.echo(printable(group))
        typer.echo(text_table(table.rows()))
        for line in table.words():
            typer.echo(printable(line))


def _is_hdf5(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(8) == b"\x89HDF\r\n\x1a\n"


def _loaded(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The network and the samples that the loading options make of a checkpoint."""
    from landscape.subject.loading.identity import protocol

    subject = loading.load(file, values, quiet=False)
    return {"network": type(subject.model).__name__, "parameters": subject.size, "protocol": protocol(subject)}


def _results(file: Path, *, numbers: bool) -> tuple[list[dict[str, Any]], str]:
    """A row per result, with its samples, and the line that leads to the doctor.

    On request, instead of that line, the rows have the numbers of the headline, their errors and units.
    """
    from landscape.plots import headlines
    from landscape.results import reader
    from landscape.results.headline_numbers import as_json
    from landscape.results.protocols import samples_of

    def summary() -> tuple[list[dict[str, Any]], str]:
        with reader.streaming(file, on_demand=True):  # once, for both
            rows = headlines.summary(
                file, lambda data: {"samples": samples_of(data), **(as_json(data) if numbers else {})}
            )
            return rows, "" if numbers else doctor.suggestion(file)

    rows, said = damaged_files.in_child(summary, [file])
    for row in rows:
        row["headline"] = row.pop("headline")  # the longest cell comes last
    return rows, said


def _in_journals(file: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each result of which more is finished than the file holds, by a run that goes on or was killed."""
    from landscape.results.replacing import behind_link
    from landscape.results.unmerged_journals import journals, standings

    held = {(row["probe"], row["digest"]): row["done"] if row["units"] else math.inf for row in rows}
    for result in standings(file) if journals(behind_link(file)) else ():
        probe, _, name = result.group.partition("/")
        more = result.finished - held.get((probe, name.rpartition("-")[2]), 0)
        if more > 0:
            how = "it is being measured now" if result.running else "the next run merges them"
            yield f"{result.group}: {counted(int(more), 'more finished unit', ',')} in its journal; {how}"


def _checkpoint(file: Path) -> dict[str, Any]:
    """What a checkpoint holds, from its outline alone: no tensor is loaded."""
    from landscape.checkpoints import containers, file_formats, raw_files

    files = raw_files.files_of(file)
    size = sum(files.values())
    rows = {
        "file": str(file),
        "sha256": raw_files.sha256_of(file) if size <= HASHED else f"not computed for {size:,} bytes; run sha256sum",
    }
    kind = file_formats.format_of(next(iter(files)))
    if kind.program:
        return rows | {"weights": f"in a {kind.name} program; loading it runs its code: give probes --trust-pickle"}
    found = file_formats.outline_of(file)
    if found.wanted:
        names = ", ".join(found.wanted[:4])
        raise ValueError(
            f"{file} would run code to load ({names}), which show never does; save its state_dict() alone, or, if the "
            "file is your own, give a probe --trust-pickle"
        )
    try:
        native = containers.is_native(found.content)
        held = containers.weights_in(found.content, "raw")
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None
    numbers = sum(entry.numel() for entry in held.weights.values())
    also = f", next to {', '.join(held.others)}" if held.others else ""
    about = {
        key: found.content.get(key) for key in ("model_args", "data", "recipe", "epoch", "metrics", "seed", "versions")
    }
    model = found.content["model"] if native else ""
    architecture = containers.architecture_in(found.content) or "not stored"
    return {
        **rows,
        "weights": f"{counted(len(held.weights), 'tensor')}, {counted(numbers, 'number', ',')} ({held.taken}{also})",
        "model": model or f"{architecture}: name it with --model",
        **(about if native else {"epoch": found.content.get("epoch", math.nan)}),
    }


LOADING = loading_options({"split": "test", "samples": "all", "batch_size": 128}, without=("weight_decay",))
with_options(
    show,
    {
        "file": (Annotated[Path, typer.Argument(help="checkpoint or results file")], ...),
        **LOADING,
        "pending": option(bool, "list the unfinished results, and the commands that finish them", False, OUTPUT),
        "follow": option(bool, "print the progress of every result until all are finished", False, OUTPUT),
        "budget": option(
            str,
            "bit-width of every unit under this mean of bits per weight, or size such as 12MB (sensitivity)",
            "",
            OUTPUT,
        ),
        "json": option(bool, "print JSON", False, OUTPUT, "--json"),
        "debug": RUN["debug"],
    },
)


POLL_SECONDS = 2.0  # between two looks at a file that is followed


def show_pending(file: Path, *, as_json: bool) -> None:
    """Print every unfinished result: how many units it lacks, which ones, and the command that measures them."""
    from landscape.results.unmerged_journals import standings

    rows = []
    found = standings(file)
    for result in found:
        if lacks := result.done.size - result.finished:
            row = {"group": result.group, "units": result.done.size, "missing": lacks, "which": result.missing()}
            rows.append({**row, "running": result.running, "command": command_for(result.attributes, file)})
    if as_json:
        typer.echo(encoding.dumps(rows))
    elif not rows:
        typer.echo(f"nothing is missing; finished results: {len(found)}")
    for row in () if as_json else rows:
        now = ", being measured now" if row["running"] else ""
        units = f"{row['missing']:,} of {row['units']:,} units missing ({row['which']}){now}"
        typer.echo(f"{printable(row['group'])}: {units}")
        typer.echo(f"  {printable(row['command'] or 'no command measures it')}")


def follow_file(file: Path, *, as_json: bool) -> None:
    """Print the progress of every result when it changes, until all are finished."""
    from landscape.results.unmerged_journals import standings

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
            seconds = (result.done.size - result.finished) / rate if rate else 0.0
            left = f", {rate:.3g}/s, about {format_duration(seconds)} left"
            text = f"{printable(result.group)} {result.finished:,}/{result.done.size:,}"
            typer.echo(encoding.dumps(row) if as_json else text + (left if rate and not result.done.all() else ""))
        if all(result.done.all() for result in found):
            return
        time.sleep(POLL_SECONDS)

"""The table of checkpoints: numbers with their 95 % intervals, one column per number and protocol."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xarray as xr

from landscape.headline import Headline
from landscape.plots.appearance import label_of
from landscape.plots.report import protocols
from landscape.results import headline_numbers, reader
from landscape.results.protocols import samples_of


@dataclass
class Column:
    """One number under one protocol."""

    number: Headline
    probe: str
    protocol: int
    example: xr.Dataset  # whose attributes and commands stand for the column
    distinct: str = ""  # in what it differs from other columns of the same number
    cells: dict[str, headline_numbers.Measured] = field(default_factory=dict)  # by checkpoint
    partial: dict[str, str] = field(default_factory=dict)  # by checkpoint, how much of its result is there

    @property
    def samples(self) -> str:
        """How many samples of which split the numbers are of: `360 test`."""
        return samples_of(self.example)


@dataclass
class Table:
    """Checkpoints, with their model, and columns."""

    checkpoints: dict[str, str]
    columns: list[Column]


def checkpoints(stored: Sequence[tuple[str, xr.Dataset]]) -> list[str]:
    """The name of every result's checkpoint: its label, with a part of the digest where several share the label."""
    digests: dict[str, set[str]] = {}
    for _, data in stored:
        digests.setdefault(label_of(data), set()).add(_digest(data))
    several = {label for label, found in digests.items() if len(found - {""}) > 1}
    return [
        f"{label_of(d)} ({_digest(d)[:6]})" if label_of(d) in several and _digest(d) else label_of(d) for _, d in stored
    ]


def comparison(stored: Sequence[tuple[str, xr.Dataset]], numbered: protocols.Protocols | None = None) -> Table:
    """The table of a study, checkpoints in its order; the newest of several results of one protocol counts.

    Numbers of different protocols, or of other parameters, are in columns of their own. Accuracy is that of the first
    probe that has one for a checkpoint.
    """
    ordered = reader.by_checkpoint(list(stored))
    names = checkpoints(ordered)
    table = Table({}, [])
    for name, (_, data) in zip(names, ordered, strict=True):
        table.checkpoints[name] = table.checkpoints.get(name) or str(data.attrs.get("model", ""))
    known: set[str] = set()  # checkpoints with an accuracy
    rows: dict[tuple[int, str, str], list[tuple[str, xr.Dataset, Headline, headline_numbers.Measured]]] = {}
    for name, (group, data) in zip(names, ordered, strict=True):
        for number, estimate in headline_numbers.numbers(data):
            if number.column:
                row = rows.setdefault((number.column, group.partition("/")[0], number.title), [])
                row.append((name, data, number, estimate))
    for (_, probe, title), results in sorted(rows.items(), key=lambda item: item[0]):
        columns: dict[tuple[str, str], Column] = {}
        for name, data, number, estimate in results:
            if title == "accuracy" and name in known:
                continue
            key = protocols.key_of(data)
            if key not in columns:
                columns[key] = Column(number, probe, (numbered or protocols.Protocols()).number(data), data)
            columns[key].cells[name] = estimate
            columns[key].partial.pop(name, None)
            if part := reader.unfinished(data):
                columns[key].partial[name] = part
        if title == "accuracy":
            known |= {name for column in columns.values() for name in column.cells}
        table.columns += columns.values()
    for column in table.columns:
        alike = [other.example for other in table.columns if other.number.title == column.number.title]
        column.distinct = protocols.distinctions(alike, column.example)
    measured = {name for column in table.columns for name in column.cells}
    table.checkpoints = {name: model for name, model in table.checkpoints.items() if name in measured}
    return table


def _digest(data: xr.Dataset) -> str:
    return str(data.attrs.get("checkpoint_sha256", ""))


def summary_table(path: Path | str) -> list[dict[str, str]]:
    """One row per number of `comparison`, for a terminal: the samples it is of, and its interval for every checkpoint.

    Empty text stands where a checkpoint was not measured.
    """
    with reader.streaming(path, on_demand=True) as stored:
        table = comparison([(name, data) for name, data in stored if not name.startswith("compare/")])
    found = []
    for column in table.columns:
        title = f"{column.number.title} ({column.distinct})" if column.distinct else column.number.title
        cells = {name: str(column.cells[name]) if name in column.cells else "" for name in table.checkpoints}
        found.append({"number": title, "samples": column.samples, **cells})
    return found

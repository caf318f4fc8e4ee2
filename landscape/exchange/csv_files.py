"""Read CSV files of other tools: published surfaces, and tables of scores; and write such surfaces.

A surface is that of Park & Kim 2022, Fig. 1a: no header, a line per point. Scores are those under corruptions, as
published or as a baseline, and accuracies over the weight of an objective, of encoders trained with (1 - weight) x a
masked-image + weight x a contrastive loss (Park et al. 2023, arXiv 2305.00729, Fig. 12).
"""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from landscape.exchange.grid import Grid, ascending, table_rows
from landscape.options import OptionError, naming
from landscape.results import declared_size, reader

METRICS = ("accuracy", "nll", "ece")
# columns of the files named *_corrupted.csv, without a header; some lack the last
PUBLISHED = (
    "severity", "corruption", "nll", "cutoff1", "cutoff2", "accuracy", "accuracy_90", "unc", "unc_90", "iou", "iou_90",
    "freq", "freq_90", "top5", "brier", "ece", "ece_signed",
)  # fmt: skip
SEVERITIES = ("1", "2", "3", "4", "5")
MOST_ROWS = 10_000
RESULTS = (".h5", ".hdf5")  # endings of results files
WEIGHT, ENDING = "weight", "_accuracy"
HYBRID = "a header of weight and accuracies, such as weight,linear_accuracy,fine_tuning_accuracy"
Row = tuple[int, list[str]]  # number of the line, its cells


@dataclass(frozen=True, eq=False)
class CorruptionTable:
    """Scores over corruptions and severities; NaN where a file has none."""

    names: tuple[str, ...]
    severities: tuple[int, ...]
    scores: dict[str, np.ndarray]  # of `METRICS`, (corruption, severity); accuracies are fractions


@dataclass(frozen=True, eq=False)
class HybridTable:
    """Accuracies over the weight of the contrastive objective."""

    weights: tuple[float, ...]  # rising, from 0 to 1
    scores: dict[str, np.ndarray]  # by column, (weight,), fractions; NaN where a cell is empty


@naming
def table_in(path: Path) -> CorruptionTable | HybridTable | None:
    """The table of a text file; None of another file, and where its first line is that of neither kind.

    Raises:
        ValueError: it is such a table and cannot be read.
    """
    if not path.is_file() or h5py.is_hdf5(path):
        return None
    _, first = next(table_rows(path), (1, []))
    if WEIGHT in first and any(name.endswith(ENDING) for name in first):
        return _hybrid_table(path)
    return corruption_table(path) if _is_of_corruptions(first) else None


def _is_of_corruptions(row: list[str]) -> bool:
    named = "corruption" in row and "severity" in row
    return named or (len(row) in (len(PUBLISHED) - 1, len(PUBLISHED)) and row[0].isdigit() and not _is_number(row[1]))


def corruption_table(path: Path) -> CorruptionTable:
    """The table of a CSV, as published (16 or 17 columns), or with a header of corruption, severity and some metrics.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has other columns, is not a number where one belongs, or stands twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; give a CSV with the columns corruption,severity,accuracy,nll,ece")
    rows = [row for row in table_rows(path) if row[1]]
    if not 0 < len(rows) <= MOST_ROWS or not _is_of_corruptions(rows[0][1]):
        raise ValueError(
            f"{path} is no table of corruptions; expected the {len(PUBLISHED) - 1} or {len(PUBLISHED)} columns of a "
            "*_corrupted.csv, or a header with corruption, severity and any of accuracy, nll, ece"
        )
    header = PUBLISHED[: len(rows[0][1])] if rows[0][1][0].isdigit() else tuple(rows.pop(0)[1])
    found: dict[tuple[str, int], dict[str, float]] = {}
    for number, cells in _cells(path, header, rows):
        if (severity := cells["severity"]) not in SEVERITIES:
            raise ValueError(f"{path} has the severity {severity:.20} in line {number}, expected 1 to 5")
        key = (cells["corruption"], int(severity))
        if key in found:
            raise ValueError(f"{path} has {key[0]} of severity {key[1]} twice, in line {number}; expected it once")
        found[key] = {name: _score(path, number, name, cells[name]) for name in METRICS if cells.get(name)}
    if not any(found.values()):
        raise ValueError(f"{path} has none of the columns {', '.join(METRICS)}; give at least one")
    names = tuple(dict.fromkeys(name for name, _ in found))
    severities = tuple(sorted({severity for _, severity in found}))
    scores = {
        metric: np.array([[found.get((name, s), {}).get(metric, np.nan) for s in severities] for name in names])
        for metric in METRICS
    }
    return CorruptionTable(names, severities, scores)


def _hybrid_table(path: Path) -> HybridTable:
    """The table of a CSV with a header of `weight` and columns that end in `_accuracy`."""
    (_, header), *lines = (row for row in table_rows(path) if row[1])
    for name in header:
        if not (name == WEIGHT or name.endswith(ENDING)) or header.count(name) > 1:
            raise ValueError(f"{path} has the column {name[:40] or 'without a name'}, expected {HYBRID}, each once")
    if not 0 < len(lines) <= MOST_ROWS:
        raise ValueError(f"{path} has {len(lines)} lines below its header, expected 1 to {MOST_ROWS}")
    found: dict[float, dict[str, float]] = {}
    for number, texts in _cells(path, header, lines):
        cells = {name: _score(path, number, name, text) if text else math.nan for name, text in texts.items()}
        weight = cells.pop(WEIGHT)
        if weight in found or math.isnan(weight):
            what = "no weight" if math.isnan(weight) else f"the weight {weight:g} twice"
            raise ValueError(f"{path} has {what}, in line {number}; expected every weight once")
        found[weight] = cells
    weights = tuple(sorted(found))
    names = [name for name in header if name != WEIGHT]
    return HybridTable(weights, {name: np.array([found[weight][name] for weight in weights]) for name in names})


def _cells(path: Path, header: Sequence[str], rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and cells of every line, by column."""
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path} has {len(row)} columns in line {number}, expected {len(header)}")
        yield number, dict(zip(header, row, strict=True))


def _score(path: Path, number: int, name: str, text: str) -> float:
    """A number, from 0 to 1 unless it is a log-likelihood."""
    if not _is_number(text):
        raise ValueError(f"{path} has {text:.20} as {name} in line {number}, expected a number")
    value = float(text)
    if name != "nll" and not 0 <= value <= 1:
        hint = "; divide percentages by 100" if 1 < value <= 100 else ""
        raise ValueError(f"{path} has {name} {value:g} in line {number}, expected a fraction from 0 to 1{hint}")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def baseline(text: str) -> CorruptionTable:
    """The table of `FILE.csv`, of `results.h5` with one answer of `corruption`, or of `results.h5:LABEL`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no finished answer.
        OptionError: a results file holds several answers and no label says which.
    """
    file, _, label = text.rpartition(":")
    stored, label = (file, label) if file.endswith(RESULTS) else (text, "")
    if not stored.endswith(RESULTS):
        return corruption_table(Path(text).expanduser())
    found = reader.find(Path(stored).expanduser(), probe="corruption", label=label or None)
    found = [(name, data) for name, data in found if (data["done"] == 1).all()]
    labels = list(dict.fromkeys(str(data.attrs.get("label", "")) for _, data in found))
    if not found:
        raise ValueError(f"{text} holds no finished answer of corruption; run landscape corruption BASELINE first")
    if len(labels) > 1:
        raise OptionError(f"--baseline {text} holds {', '.join(labels)}; say which, such as {stored}:{labels[0]}")
    data = found[-1][1]
    names = tuple(str(name) for name in data["corruption_name"].values)
    severities = tuple(int(s) for s in data["severity"].values)
    return CorruptionTable(names, severities, {name: np.asarray(data[name].values, float) for name in METRICS})


def selected(
    table: CorruptionTable, names: Sequence[str], severities: Sequence[int], text: str
) -> dict[str, np.ndarray]:
    """The scores of these corruptions and severities, (corruption, severity); NaN of a metric that it lacks.

    Raises:
        OptionError: the baseline lacks a corruption or a severity.
    """
    lacking = [name for name in names if name not in table.names]
    lacking += [f"severity {s}" for s in severities if s not in table.severities]
    if lacking:
        raise OptionError(
            f"--baseline {text} has no {lacking[0]}; it has {', '.join(table.names)} at severities "
            f"{', '.join(map(str, table.severities))}; leave it out with --corruptions and --severities"
        )
    rows, columns = [table.names.index(name) for name in names], [table.severities.index(s) for s in severities]
    return {metric: values[np.ix_(rows, columns)] for metric, values in table.scores.items()}


# column -> name in the results file
COLUMNS = {
    "x": "x", "y": "y", "l1": "l1", "l2": "l2", "NLL": "loss", "cutoff1": "cutoff1", "cutoff2": "cutoff2",
    "acc": "accuracy", "acc-90": "accuracy_90", "unc": "unc", "unc-90": "unc_90", "IoU": "iou", "IoU-90": "iou_90",
    "freq": "freq", "freq-90": "freq_90", "top-5": "top5", "Brier": "brier", "ECE": "ece", "ECSE": "ecse",
}  # fmt: skip
SLACK = 10_000  # points of a grid below which it may be nearly empty
WEIGHT_DECAY = 0.05  # of the published figure, whose height is NLL + weight decay x l2


def read_surface(path: Path, *, weight_decay: float = WEIGHT_DECAY) -> Grid:
    """The surface, with `objective` = loss + weight decay x l2, which is what the published figure shows.

    Raises:
        ValueError: a line cannot be parsed, or the points are not a grid.
    """
    rows = []
    for number, row in table_rows(path):
        if not row:
            continue
        if len(row) != len(COLUMNS):
            wanted = f"the {len(COLUMNS)} of a published surface: {', '.join(COLUMNS)}"
            raise ValueError(f"{path} has {len(row)} columns in line {number}, expected {wanted}")
        try:
            rows.append([float(value) for value in row])
        except ValueError as error:
            what = f"a value that is not a number in line {number} ({error})"
            raise ValueError(f"{path} has {what}; expected no header") from None
    if not rows:
        raise ValueError(f"{path} is empty, expected one line per point of a surface")
    table = np.array(rows)
    axes, places = zip(*(np.unique(table[:, i], return_inverse=True) for i in (0, 1)), strict=True)
    if min(map(len, axes)) < 2 or not np.isfinite(table[:, :2]).all():
        raise ValueError(f"{path} has {len(axes[0])} x {len(axes[1])} points, expected a grid of at least 2 x 2")
    if len(axes[0]) * len(axes[1]) > declared_size.EXPANSION * len(rows) + SLACK:
        raise ValueError(
            f"{path} has {len(rows):,} points at {len(axes[0]):,} x {len(axes[1]):,} coordinates, expected a "
            "grid; give a surface whose points share their coordinates"
        )
    done = np.zeros(tuple(map(len, axes)), bool)
    if len(set(zip(*places, strict=True))) < len(rows):
        raise ValueError(f"{path} has a point twice; expected one line per point of a surface")
    done[places] = True
    values = {name: np.full(done.shape, np.nan) for name in list(COLUMNS.values())[2:]}
    for array, column in zip(values.values(), table.T[2:], strict=True):
        array[places] = column
    values["loss_se"] = np.full(done.shape, np.nan)
    values["objective"] = values["loss"] + weight_decay * values["l2"]
    exact, _ = ascending(axes)
    facts: dict[str, str | float] = {"l2_definition": "park2022", "weight_decay": weight_decay}
    return Grid(dict(zip(("x", "y"), exact, strict=True)), values, done, facts)


def surface_file(grid: Grid) -> bytes:
    """The finished points, x fastest; columns that the surface lacks are nan."""
    unknown = np.full(grid.done.shape, np.nan)
    x, y = np.meshgrid(grid.axes["x"], grid.axes["y"], indexing="ij")
    known = {**grid.values, "x": x, "y": y}
    if grid.facts.get("l2_definition") != "park2022":
        known["l2"] = unknown  # another definition: half the squared norm
    table = np.stack([known.get(name, unknown).T[grid.done.T] for name in COLUMNS.values()], axis=1)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(table.tolist())
    return text.getvalue().encode()

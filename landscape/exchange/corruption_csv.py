"""Read scores under corruptions from the CSVs of spatial-smoothing and how-do-vits-work, or from one with a header."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from landscape.exchange.grid import table_rows

METRICS = ("accuracy", "nll", "ece")
# columns of the files named *_corrupted.csv, without a header; some lack the last
PUBLISHED = (
    "severity", "corruption", "nll", "cutoff1", "cutoff2", "accuracy", "accuracy_90", "unc", "unc_90", "iou", "iou_90",
    "freq", "freq_90", "top5", "brier", "ece", "ece_signed",
)  # fmt: skip
MOST_ROWS = 10_000


@dataclass(frozen=True, eq=False)
class CorruptionTable:
    """Scores over corruptions and severities; NaN where a file has none."""

    names: tuple[str, ...]
    severities: tuple[int, ...]
    scores: dict[str, np.ndarray]  # of `METRICS`, (corruption, severity); accuracies are fractions


def is_table(path: Path) -> bool:
    """Whether the first line of a text file is one of a table of corruptions."""
    row = [part.strip() for part in next(table_rows(path), (1, []))[1]]
    named = "corruption" in row and "severity" in row
    return named or (len(row) in (len(PUBLISHED) - 1, len(PUBLISHED)) and row[0].isdigit() and not _is_number(row[1]))


def read(path: Path) -> CorruptionTable:
    """The table of a CSV, as published (16 or 17 columns), or with a header of corruption, severity and some metrics.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line has other columns, is not a number where one belongs, or stands twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; give a CSV with the columns corruption,severity,accuracy,nll,ece")
    rows = [(number, [part.strip() for part in row]) for number, row in table_rows(path) if row]
    if not rows or len(rows) > MOST_ROWS or not is_table(path):
        raise ValueError(
            f"{path} is no table of corruptions; expected the {len(PUBLISHED) - 1} or {len(PUBLISHED)} columns of a "
            "*_corrupted.csv, or a header with corruption, severity and any of accuracy, nll, ece"
        )
    header = PUBLISHED[: len(rows[0][1])] if rows[0][1][0].isdigit() else tuple(rows.pop(0)[1])
    found: dict[tuple[str, int], dict[str, float]] = {}
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{path} has {len(row)} columns in line {number}, expected {len(header)}")
        cells = dict(zip(header, row, strict=True))
        key = (cells["corruption"], _severity(path, number, cells["severity"]))
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


def _severity(path: Path, number: int, text: str) -> int:
    if text not in ("1", "2", "3", "4", "5"):
        raise ValueError(f"{path} has the severity {text:.20} in line {number}, expected 1 to 5")
    return int(text)


def _score(path: Path, number: int, name: str, text: str) -> float:
    if not _is_number(text):
        raise ValueError(f"{path} has {text:.20} as {name} in line {number}, expected a number")
    value = float(text)
    if name != "nll" and not 0 <= value <= 1:
        raise ValueError(f"{path} has {name} {value:g} in line {number}, expected a fraction from 0 to 1")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

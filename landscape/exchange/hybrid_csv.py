"""Read accuracies of encoders trained with a mixture of a masked-image and a contrastive objective (Park et al. 2023).

The loss is (1 - weight) x masked-image + weight x contrastive (arXiv 2305.00729, Fig. 12).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from landscape.exchange.grid import table_rows

WEIGHT, ENDING = "weight", "_accuracy"
MOST_ROWS = 10_000
EXPECTED = "a header of weight and accuracies, such as weight,linear_accuracy,fine_tuning_accuracy"


@dataclass(frozen=True, eq=False)
class HybridTable:
    """Accuracies over the weight of the contrastive objective."""

    weights: tuple[float, ...]  # rising, from 0 to 1
    scores: dict[str, np.ndarray]  # by column, (weight,), fractions; NaN where a cell is empty


def is_table(path: Path) -> bool:
    """Whether the first line of a text file is the header of such a table."""
    _, row = next(table_rows(path), (1, []))
    names = [part.strip() for part in row]
    return WEIGHT in names and any(name.endswith(ENDING) for name in names)


def read(path: Path) -> HybridTable:
    """The table of a CSV with a header of `weight` and columns that end in `_accuracy`.

    Raises:
        ValueError: a column, a number or the number of columns is another than expected, or a weight stands twice.
    """
    rows = [(number, [part.strip() for part in row]) for number, row in table_rows(path) if row]
    (_, header), *lines = rows
    for name in header:
        if not (name == WEIGHT or name.endswith(ENDING)) or header.count(name) > 1:
            raise ValueError(f"{path} has the column {name[:40] or 'without a name'}, expected {EXPECTED}, each once")
    if not 0 < len(lines) <= MOST_ROWS:
        raise ValueError(f"{path} has {len(lines)} lines below its header, expected 1 to {MOST_ROWS}")
    found: dict[float, dict[str, float]] = {}
    for number, row in lines:
        if len(row) != len(header):
            raise ValueError(f"{path} has {len(row)} columns in line {number}, expected {len(header)}")
        cells = {name: _fraction(path, number, name, text) for name, text in zip(header, row, strict=True)}
        weight = cells.pop(WEIGHT)
        if weight in found or math.isnan(weight):
            what = "no weight" if math.isnan(weight) else f"the weight {weight:g} twice"
            raise ValueError(f"{path} has {what}, in line {number}; expected every weight once")
        found[weight] = cells
    weights = tuple(sorted(found))
    names = [name for name in header if name != WEIGHT]
    return HybridTable(weights, {name: np.array([found[weight][name] for weight in weights]) for name in names})


def _fraction(path: Path, number: int, name: str, text: str) -> float:
    """A number from 0 to 1; NaN of an empty cell."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{path} has {text:.20} as {name} in line {number}, expected a number") from None
    if text and not 0 <= value <= 1:
        hint = "; divide percentages by 100" if 1 < value <= 100 else ""
        raise ValueError(f"{path} has {name} {value:g} in line {number}, expected a fraction from 0 to 1{hint}")
    return value

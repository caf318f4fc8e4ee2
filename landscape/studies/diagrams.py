"""Phase diagrams: a number of networks over one or two arguments that they were trained with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape.statistics import rounding, seed_groups
from landscape.studies import claims, study


@dataclass(frozen=True)
class Diagram:
    """A number as mean over seeds with its interval, by the values of one or two arguments."""

    number: str
    over: Sequence[str]
    of: str  # what the networks have in common
    cells: Mapping[tuple[Any, ...], study.Number]

    def values(self, axis: int) -> list[str]:
        """The values of an argument in the order of the file, in words."""
        return list(dict.fromkeys(study.in_words(at[axis]) for at in self.cells))

    def row(self, second: str = "") -> list[study.Number | None]:
        """The cells over the first argument, at a value of the second where there are two; None where none is."""
        by_words = {tuple(map(study.in_words, at)): cell for at, cell in self.cells.items()}
        return [by_words.get((first, second) if len(self.over) > 1 else (first,)) for first in self.values(0)]


def diagram(
    number: str, over: Sequence[str], of: str, networks: Mapping[str, Mapping[str, Any]], values: Mapping[Any, Any]
) -> Diagram:
    """A diagram of networks with their arguments, from numbers by (number, network), one per seed."""
    cells = {}
    for name, at in networks.items():
        known = np.array(values[number, name], dtype=float)
        if (known := known[np.isfinite(known)]).size:
            cells[tuple(at[argument] for argument in over)] = seed_groups.mean_interval(known)
    return Diagram(number, over, of, cells)


def table(found: Diagram) -> str:
    """A diagram as a Markdown table: the first argument in columns, the second in rows."""
    two = len(found.over) > 1
    head = (f"{found.number} of {found.of}, {' by '.join(found.over)} [95 %]", *found.values(0))
    rows = [
        (second, *("" if cell is None else rounding.interval(*cell) for cell in found.row(second)))
        for second in (found.values(1) if two else [""])
    ]
    return "\n".join(["", *claims.markdown(head, rows), ""])

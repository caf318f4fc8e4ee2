"""What a study tells of numbers over its networks: Kendall's tau of two, and diagrams over training arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from landscape.statistics import rounding, seed_groups
from landscape.studies import claims, study

TITLE = "Kendall's tau over networks [95 %, by resampling them with all their seeds]:"


@dataclass(frozen=True)
class Correlation:
    """Two numbers of networks, as means over seeds with their intervals, and how they are correlated."""

    names: tuple[str, str]
    groups: Sequence[str]  # of every network; "" without
    x: Sequence[study.Number]
    y: Sequence[study.Number]

    @property
    def over_all(self) -> study.Number:
        """Tau of all pairs of networks, and the ends of its interval."""
        return seed_groups.kendall(*self._means)

    @property
    def within(self) -> study.Number:
        """Tau of the pairs of networks in one group; NaN for fewer than two groups."""
        return seed_groups.kendall(*self._means, self.groups) if len(set(self.groups)) > 1 else study.UNKNOWN

    @property
    def _means(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([mean for mean, *_ in self.x]), np.array([mean for mean, *_ in self.y])


def correlation(
    names: tuple[str, str], groups: Mapping[str, str], values: Mapping[tuple[str, str], Sequence[float]]
) -> Correlation:
    """The correlation of two numbers, from those of every network (number, network) by seed.

    Of seeds with both numbers; networks without such a seed are left out. `groups` are by network.
    """
    found, kept = [], []
    for network, group in groups.items():
        both = np.array([values[name, network] for name in names], dtype=float)
        both = both[:, np.isfinite(both).all(axis=0)]
        if both.shape[1]:
            found.append(tuple(seed_groups.mean_interval(row) for row in both))
            kept.append(group)
    return Correlation(names, kept, [x for x, _ in found], [y for _, y in found])


def correlation_table(found: Sequence[Correlation]) -> str:
    """The correlations as a Markdown table; none for none."""
    if not found:
        return ""
    rows = [(" and ".join(one.names), len(one.x), in_words(one.over_all), in_words(one.within)) for one in found]
    return "\n".join(["", TITLE, "", *claims.markdown(("numbers", "networks", "over all", "within groups"), rows), ""])


def in_words(tau: study.Number) -> str:
    """Tau with its interval."""
    value, low, high = tau
    if np.isnan(value):
        return "not known"
    return rounding.interval(value, low, high, sign=True) if np.isfinite(low) else f"{value:+.2g}, without an interval"


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

    def row(self, second: str = "") -> list[study.Number]:
        """The cells over the first argument, at a value of the second where there are two; NaN where there is none."""
        by_words = {tuple(map(study.in_words, at)): cell for at, cell in self.cells.items()}
        return [by_words.get((first, second)[: len(self.over)], study.UNKNOWN) for first in self.values(0)]


def diagram(
    number: str, over: Sequence[str], of: str, networks: Mapping[str, Mapping[str, Any]], values: Mapping[Any, Any]
) -> Diagram:
    """A diagram of networks with their arguments, from numbers by (number, network), one per seed."""
    cells = {}
    for name, at in networks.items():
        known = np.array(values[number, name], dtype=float)
        place, known = tuple(at[argument] for argument in over), known[np.isfinite(known)]
        cells[place] = seed_groups.mean_interval(known) if known.size else study.UNKNOWN
    return Diagram(number, over, of, cells)


def diagram_table(found: Diagram) -> str:
    """A diagram as a Markdown table: the first argument in columns, the second in rows."""
    two = len(found.over) > 1
    head = (f"{found.number} of {found.of}, {' by '.join(found.over)} [95 %]", *found.values(0))
    rows = [
        (second, *("no value" if np.isnan(cell[0]) else rounding.interval(*cell) for cell in found.row(second)))
        for second in (found.values(1) if two else [""])
    ]
    return "\n".join(["", *claims.markdown(head, rows), ""])

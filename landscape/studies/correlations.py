"""Correlate two numbers over the networks of a study: Kendall's tau over all of them, and within their groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from landscape.statistics.rank_correlation import kendall
from landscape.statistics.rounding import interval
from landscape.statistics.seed_groups import mean_interval
from landscape.studies.claims import markdown
from landscape.studies.study import UNKNOWN, Number

TITLE = "Kendall's tau over networks [95 %, by resampling them with all their seeds]:"


@dataclass(frozen=True)
class Correlation:
    """Two numbers of networks, as means over seeds with their intervals, and how they are correlated."""

    names: tuple[str, str]
    groups: Sequence[str]  # of every network; "" without
    x: Sequence[Number]
    y: Sequence[Number]

    @property
    def over_all(self) -> Number:
        """Tau of all pairs of networks, and the ends of its interval."""
        return kendall(*self._means)

    @property
    def within(self) -> Number:
        """Tau of the pairs of networks in one group; NaN for fewer than two groups."""
        return kendall(*self._means, self.groups) if len(set(self.groups)) > 1 else UNKNOWN

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
            found.append(tuple(mean_interval(row) for row in both))
            kept.append(group)
    return Correlation(names, kept, [x for x, _ in found], [y for _, y in found])


def table(found: Sequence[Correlation]) -> str:
    """The correlations as a Markdown table; none for none."""
    if not found:
        return ""
    rows = [(" and ".join(one.names), len(one.x), in_words(one.over_all), in_words(one.within)) for one in found]
    return "\n".join(["", TITLE, "", *markdown(("numbers", "networks", "over all", "within groups"), rows), ""])


def in_words(tau: Number) -> str:
    """Tau with its interval."""
    value, low, high = tau
    if np.isnan(value):
        return "not known"
    return interval(value, low, high, sign=True) if np.isfinite(low) else f"{value:+.2g}, without an interval"

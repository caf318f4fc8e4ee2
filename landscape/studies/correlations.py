"""Correlate two numbers over the networks of a study: Kendall's tau over all of them, and within their groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from landscape.statistics import rank_correlation, rounding, seed_groups
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
        return rank_correlation.kendall(*self._means)

    @property
    def within(self) -> study.Number:
        """Tau of the pairs of networks in one group; NaN for fewer than two groups."""
        return rank_correlation.kendall(*self._means, self.groups) if len(set(self.groups)) > 1 else study.UNKNOWN

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


def table(found: Sequence[Correlation]) -> str:
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

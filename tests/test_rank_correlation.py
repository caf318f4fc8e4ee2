"""Kendall's tau against SciPy and a count of pairs, and how often its interval covers."""

import math

import numpy as np
import pytest
from scipy import stats

from landscape.statistics.seed_groups import kendall


def test_tau_is_that_of_scipy_also_with_ties_and_of_pairs_of_a_group_within_groups() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.integers(0, 6, (2, 20)).astype(float)
    value, low, high = kendall(x, y)
    assert value == pytest.approx(stats.kendalltau(x, y).statistic)
    assert low < value < high
    x, y, groups = generator.normal(size=20), generator.normal(size=20), ["a"] * 8 + ["b"] * 12
    pairs = [(i, j) for i in range(20) for j in range(i) if groups[i] == groups[j]]
    signs = [np.sign((x[i] - x[j]) * (y[i] - y[j])) for i, j in pairs]
    assert kendall(x, y, groups)[0] == pytest.approx(np.mean(signs))


def test_tau_without_networks_or_spread_has_no_interval() -> None:
    x = np.arange(12.0)
    assert np.isnan(kendall(x[:7], x[:7])).all()
    assert kendall(x, np.exp(x))[0] == 1
    assert np.isnan(kendall(x, np.exp(x))[1:]).all()
    assert np.isnan(kendall(x, np.ones(12))).all()


@pytest.mark.parametrize("tau", [0.0, 0.5])
def test_the_interval_covers(tau: float) -> None:
    """The whole simulation is in benchmarks/RESULTS.md; of 300 studies 92 to 98 % are within four standard errors."""
    generator, correlation, covered = np.random.default_rng(2), math.sin(math.pi / 2 * tau), 0
    for _ in range(300):
        x, noise = generator.normal(size=(2, 12))
        _, low, high = kendall(x, correlation * x + math.sqrt(1 - correlation**2) * noise, draws=400)
        covered += low <= tau <= high
    assert 0.92 * 300 <= covered <= 0.985 * 300

"""Means and standard errors: closed forms, and the three definitions agree."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from landscape.plots import headlines
from landscape.plots.comparison.rows import signed
from landscape.results.headline_numbers import Measured
from landscape.statistics.intervals import quantile
from landscape.statistics.means import mean_and_standard_error, mean_and_standard_error_from_sums
from landscape.statistics.paired import mean_difference
from landscape.statistics.rounding import interval, plus_minus
from landscape.statistics.seed_groups import kendall
from landscape.subject import sample_statistics


def test_error_is_the_unbiased_deviation_over_the_root_of_the_count() -> None:
    assert mean_and_standard_error(np.array([1.0, 2.0, 3.0, 6.0])) == (3.0, math.sqrt(14 / 3 / 4))


def test_single_infinite_and_absent_values_have_no_error() -> None:
    for mean, error in (
        mean_and_standard_error(np.array([2.0])),
        sample_statistics.mean_and_standard_error(torch.tensor([2.0])),
        mean_and_standard_error_from_sums(np.float64(2.0), np.float64(4.0), 1),
    ):
        assert mean == 2.0
        assert np.isnan(error)
    mean, error = mean_and_standard_error(np.array([1.0, np.inf]))
    assert mean == np.inf
    assert np.isnan(error)
    means, errors = mean_and_standard_error_from_sums(np.array([0.0, 4.0]), np.array([0.0, 10.0]), np.array([0, 2]))
    assert np.isnan([means[0], errors[0]]).all()
    assert (means[1], errors[1]) == (2.0, 1.0)


def test_sums_and_tensors_give_the_same_to_rounding() -> None:
    values = np.random.default_rng(0).exponential(size=(3, 50))
    means, errors = mean_and_standard_error_from_sums(values.sum(1), (values**2).sum(1), np.full(3, 50))
    for row, mean, error in zip(values, means, errors, strict=True):
        assert (mean, error) == pytest.approx(mean_and_standard_error(row))
        assert (mean, error) == pytest.approx(sample_statistics.mean_and_standard_error(torch.from_numpy(row)))


def test_the_interval_of_a_paired_difference_is_wide_where_nothing_differs() -> None:
    same = np.ones((1, 10))
    (mean,), ((low,), (high,)) = mean_difference(same, same, shares=True)
    assert (mean, low) == (0.0, -high)
    assert high == pytest.approx(quantile(10) * np.sqrt(2) / 12)  # Bonett & Price: one more sample of either sign
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        hard = random.random(60)
        one, other = (random.random(60) < (1 - hard * share) for share in (0.5, 0.3))
        _, ((low,), (high,)) = mean_difference(one[None] * 1.0, other[None] * 1.0, shares=True)
        covered += int(low <= -0.1 <= high)
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


# --- Kendall's tau against SciPy and a count of pairs, and how often its interval covers ---


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


# --- Numbers are written with the digits that their errors call for ---


@pytest.mark.parametrize(
    ("value", "error", "digits", "text"),
    [
        (0.12345, 0.0123, 2, "0.123 ± 0.012"), (816.95, 89.4, 2, "817 ± 89"), (1740.6, 99.9, 2, "1740 ± 100"),
        (4.3164, 0.0876, 1, "4.32 ± 0.09"), (2.04, 0.0963, 1, "2.0 ± 0.1"), (1740.6, 99.9, 1, "1700 ± 100"),
        (0.5, np.nan, 1, "0.5"), (1 / 3, 0.0, 1, "0.3333"), (np.nan, 0.1, 1, "nan"),
        (1.5e-12, 2e-13, 1, "1.5e-12 ± 2e-13"), (1.5e12, 2e10, 1, "1.5e+12 ± 2e+10"),
    ],
)  # fmt: skip
def test_digits_follow_the_error(value: float, error: float, digits: int, text: str) -> None:
    assert plus_minus(value, error, digits) == text


def test_digits_follow_the_width_of_an_interval_which_a_headline_puts_beside_its_number() -> None:
    assert interval(0.12345, 0.1, 0.15, sign=True) == "+0.123 [+0.100, +0.150]"
    assert interval(1e-12, np.nan, np.nan) == "1e-12"
    assert signed(interval(-1e-12, -3e-12, 1e-12)) == "−1e-12 [−3e-12, 1e-12]"
    even = Measured("barrier", 4.3164, 0.04, 4.2288, 4.404)
    uneven = Measured("ape", 4.3164, 0.04, 4.25, 4.5)
    assert (even.in_words(), uneven.in_words()) == ("4.32 ± 0.09", "4.32 [4.25, 4.50]")
    found = {"barrier": even.in_words(), "barrier_se": 0.04, "mean": 3.25, "at": "stage 2"}
    assert headlines.text(found) == "barrier 4.32 ± 0.09, mean 3.25, at stage 2"

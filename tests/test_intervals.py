"""Intervals: closed forms, nothing below four values, and the share of cases in which they hold the truth."""

from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import xarray as xr

from landscape.statistics.intervals import FEWEST, interval, p_value, positive_interval, quantile, share_interval
from landscape.statistics.paired import unpaired
from landscape.statistics.seed_groups import two_groups
from landscape.statistics.stored import count_of, ends_of, half_width

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
TRIALS = 20_000
CASES: dict[str, tuple[Draw, float, str]] = {  # values, their mean, the bounds of the quantity
    "normal": (lambda r, shape: r.standard_normal(shape), 0.0, ""),
    "heavy tails (t, 5 degrees)": (lambda r, shape: r.standard_t(5, shape), 0.0, ""),
    "heavy tails (t, 3 degrees)": (lambda r, shape: r.standard_t(3, shape), 0.0, ""),
    "skewed (gamma, shape 9)": (lambda r, shape: r.gamma(9, size=shape), 9.0, ""),
    "skewed and positive (gamma, shape 4)": (lambda r, shape: r.gamma(4, size=shape), 4.0, "positive"),
    "skewed and positive (exponential)": (lambda r, shape: r.exponential(size=shape), 1.0, "positive"),
}
BY_BOUNDS = {"": interval, "positive": positive_interval}


def coverage(case: str, n: int) -> float:
    """Share of intervals over n values that hold the mean; 0 where there is none."""
    draw, truth, bounds = CASES[case]
    values = draw(np.random.default_rng(n), (TRIALS, n))
    low, high = BY_BOUNDS[bounds](values.mean(axis=1), values.std(axis=1, ddof=1) / np.sqrt(n), n)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [2, 3, 4, 8, 32])
def test_intervals_hold_the_truth_in_95_of_100_cases_and_there_is_none_below_four_values(case: str, n: int) -> None:
    found = coverage(case, n)
    if n < FEWEST:
        assert found == 0.0
    else:
        assert 0.93 <= found <= 0.97


@pytest.mark.parametrize(("n", "spread"), [(2, 1.0), (2, 10.0), (4, 10.0), (64, 1.0)])  # of the second over the first
def test_of_equal_networks_at_most_some_five_in_a_hundred_are_told_apart(n: int, spread: float) -> None:
    random = np.random.default_rng(n)
    groups = random.standard_normal((1000, 2, n)) * [[1.0], [spread]]
    by_values = [two_groups(one, other).p < 0.05 for one, other in groups]
    means, errors = groups.mean(axis=2), groups.std(axis=2, ddof=1) / np.sqrt(n)
    by_errors = [
        unpaired((m[0], e[0], n), (m[1], e[1], n)).p < 0.05
        for m, e in zip(means.tolist(), errors.tolist(), strict=True)
    ]
    assert by_values == by_errors
    assert (0.01 if n == 2 else 0.04) <= np.mean(by_values) <= 0.07  # Student's: 0.05, 0.12, 0.09, 0.05


def test_an_interval_is_that_of_students_t_normal_of_many_values_and_unknown_of_none() -> None:
    values = np.array([1.0, 2.0, 4.0, 3.0, 7.0])
    low, high = interval(values.mean(), scipy.stats.sem(values), len(values))
    expected = scipy.stats.t.interval(0.95, 4, loc=values.mean(), scale=scipy.stats.sem(values))
    assert (float(low), float(high)) == pytest.approx(expected)
    p = p_value(values.mean(), scipy.stats.sem(values), len(values))
    assert float(p) == pytest.approx(scipy.stats.ttest_1samp(values, 0.0).pvalue)
    assert quantile(np.array([np.inf, 1e9])) == pytest.approx(scipy.stats.norm.ppf(0.975))
    assert np.isnan(quantile(np.array([np.nan, 1.0, 3.0]))).all()


@pytest.mark.parametrize(("right", "n"), [(0, 50), (30, 50), (50, 50), (190, 200)])
def test_the_interval_of_a_share_is_wilsons_and_stays_a_share(right: int, n: int) -> None:
    p = right / n
    low, high = share_interval(p, np.sqrt(p * (1 - p) / n), n)
    expected = scipy.stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), abs=0.004)  # t for the normal
    assert 0 <= low <= p <= high <= 1


def test_intervals_of_few_shares_per_sample_cover_the_truth() -> None:
    values = np.random.default_rng(0).beta(9.0, 1.0, size=(2000, 20))  # mean 0.9, as consistencies of few images
    low, high = share_interval(values.mean(axis=1), values.std(axis=1, ddof=1) / np.sqrt(20), 20)
    assert (high <= 1).all()
    assert ((low <= 0.9) & (high >= 0.9)).mean() == pytest.approx(0.95, abs=0.02)


def test_intervals_above_zero_stay_there_and_are_symmetric_where_the_error_is_small() -> None:
    low, high = positive_interval(np.array([0.1, 2.0, 0.0]), np.array([0.1, 0.01, 0.0]), np.inf)
    assert 0 < low[0] < 0.1 < high[0]
    assert (low[1], high[1]) == pytest.approx((2 - 0.0196, 2 + 0.0196), abs=2e-4)
    assert np.isnan([low[2], high[2]]).all()


def test_a_stored_quantity_has_the_interval_of_its_error_its_number_of_values_and_its_bounds() -> None:
    data = xr.Dataset(
        {"nep": 0.2, "nep_se": 0.1, "ape": 3.0, "ape_se": 1.0, "loss": 1.0, "each": ("batch", [1.0, 2.0])}
    )
    data["nep"].attrs["bounds"] = "share"
    data["nep_se"].attrs["n"] = 6
    data["each_se"] = ("batch", [0.1, 0.1], {"over": "vectors"})
    data["vectors"] = ("batch", [3, 8])
    assert ends_of(data, "nep") == share_interval(0.2, 0.1, 6)
    assert np.isnan(ends_of(data, "ape")).all()  # n is not known
    assert np.isnan(ends_of(data, "loss")).all()
    assert float(count_of(data, "nep")) == 6
    assert np.isnan(half_width(data, "each")).tolist() == [True, False]

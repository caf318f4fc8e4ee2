"""Means and standard errors: closed forms, and the three definitions agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from landscape.results.paired import mean_difference
from landscape.results.statistics import (
    mean_and_standard_error,
    mean_and_standard_error_from_sums,
    positive_interval,
    share_interval,
)
from landscape.subject import sample_statistics


def test_error_is_the_unbiased_deviation_over_the_root_of_the_count() -> None:
    assert mean_and_standard_error(np.array([1.0, 2.0, 3.0, 6.0])) == (3.0, math.sqrt(14 / 3 / 4))


def test_a_single_value_has_a_mean_and_no_error() -> None:
    for mean, error in (
        mean_and_standard_error(np.array([2.0])),
        sample_statistics.mean_and_standard_error(torch.tensor([2.0])),
        mean_and_standard_error_from_sums(np.float64(2.0), np.float64(4.0), 1),
    ):
        assert mean == 2.0
        assert np.isnan(error)


def test_an_infinite_value_gives_no_warning() -> None:
    mean, error = mean_and_standard_error(np.array([1.0, np.inf]))
    assert mean == np.inf
    assert np.isnan(error)


def test_sums_and_tensors_give_the_same_to_rounding() -> None:
    values = np.random.default_rng(0).exponential(size=(3, 50))
    means, errors = mean_and_standard_error_from_sums(values.sum(1), (values**2).sum(1), np.full(3, 50))
    for row, mean, error in zip(values, means, errors, strict=True):
        assert (mean, error) == pytest.approx(mean_and_standard_error(row))
        assert (mean, error) == pytest.approx(sample_statistics.mean_and_standard_error(torch.from_numpy(row)))


def test_where_nothing_was_summed_both_are_missing() -> None:
    means, errors = mean_and_standard_error_from_sums(np.array([0.0, 4.0]), np.array([0.0, 10.0]), np.array([0, 2]))
    assert np.isnan([means[0], errors[0]]).all()
    assert (means[1], errors[1]) == (2.0, 1.0)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (3, 5), (5, 5), (190, 200)])
def test_the_interval_of_a_share_is_wilsons_and_stays_a_share(right: int, n: int) -> None:
    p = right / n
    low, high = share_interval(p, np.sqrt(p * (1 - p) / n), n)
    expected = scipy.stats.binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert 0 <= low <= p <= high <= 1


def test_intervals_of_few_shares_per_sample_cover_the_truth() -> None:
    random, covered = np.random.default_rng(0), 0
    for _ in range(400):
        values = random.beta(9.0, 1.0, size=20)  # mean 0.9, as consistencies of few images
        low, high = share_interval(*mean_and_standard_error(values), 20)
        covered += int(low <= 0.9 <= high)
        assert high <= 1
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_intervals_above_zero_stay_there_and_are_normal_where_the_error_is_small() -> None:
    low, high = positive_interval(np.array([0.1, 2.0, 0.0]), np.array([0.1, 0.01, 0.0]))
    assert 0 < low[0] < 0.1 < high[0]
    assert (low[1], high[1]) == pytest.approx((2 - 0.0196, 2 + 0.0196), abs=2e-4)
    assert np.isnan([low[2], high[2]]).all()


def test_the_interval_of_a_paired_difference_is_wide_where_nothing_differs() -> None:
    same = np.ones((1, 10))
    (mean,), ((low,), (high,)) = mean_difference(same, same, shares=True)
    assert (mean, low) == (0.0, -high)
    assert high == pytest.approx(1.96 * np.sqrt(2) / 12)  # Bonett & Price: one more sample of either sign
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        hard = random.random(60)
        one, other = (random.random(60) < (1 - hard * share) for share in (0.5, 0.3))
        _, ((low,), (high,)) = mean_difference(one[None] * 1.0, other[None] * 1.0, shares=True)
        covered += int(low <= -0.1 <= high)
    assert covered / 400 == pytest.approx(0.95, abs=0.03)

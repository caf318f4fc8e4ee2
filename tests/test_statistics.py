"""Means and standard errors: closed forms, and the three definitions agree."""

import math

import numpy as np
import pytest
import torch

from landscape.statistics.intervals import quantile
from landscape.statistics.means import mean_and_standard_error, mean_and_standard_error_from_sums
from landscape.statistics.paired import mean_difference
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

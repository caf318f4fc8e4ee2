"""Means and standard errors: closed forms, and the three definitions agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from landscape.results.statistics import mean_and_standard_error, mean_and_standard_error_from_sums
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

"""Means and their standard errors: one definition for all that is measured or summarised in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Sum = np.ndarray | np.float64


def mean_and_standard_error(values: np.ndarray) -> tuple[float, float]:
    """Mean of independent values and its standard error, std(ddof=1) / sqrt(n); NaN for fewer than two values.

    Args:
        values: (n,); infinite ones give NaN without a warning.
    """
    with np.errstate(invalid="ignore"):
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        return float(values.mean()), float(error)


def mean_and_standard_error_from_sums(total: Sum, squares: Sum, n: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same, elementwise, from the sums of the values and of their squares; NaN where n is too small.

    Args:
        total: sum of the values; a scalar as `np.float64`.
        squares: sum of the squared values.
        n: how many values, a number or an array.
    """
    with np.errstate(all="ignore"):
        mean: Any = total / n  # not made an array: NumPy squares scalars and arrays to different last digits
        variance = np.clip(squares - n * mean**2, 0.0, None) / (n - 1)
        return mean, np.sqrt(np.where(n > 1, variance, np.nan) / n)


def mean_over_batches(data: Mapping[str, np.ndarray], total: str, squares: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the samples of all finished mini-batches, from stored sums per mini-batch.

    Args:
        data: stored arrays, among them `done` and `samples`, (batch,).
        total: name of the sums, (batch, ...).
        squares: name of the sums of squares.
    """
    done = data["done"] == 1
    sums = (data[name][done].sum(axis=0) for name in (total, squares, "samples"))
    return mean_and_standard_error_from_sums(*sums)

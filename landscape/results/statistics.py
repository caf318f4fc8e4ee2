"""Compute means and their standard errors: one definition for everything summarised in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Sum = np.ndarray | np.float64


def mean_and_standard_error(values: np.ndarray) -> tuple[float, float]:
    """Mean of independent values (n,) and its standard error, std(ddof=1) / sqrt(n); NaN for fewer than two values.

    Infinite values give NaN without a warning.
    """
    with np.errstate(invalid="ignore"):
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        return float(values.mean()), float(error)


def mean_and_standard_error_from_sums(total: Sum, squares: Sum, n: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same, elementwise, from the sums of n values and of their squares; NaN where n is too small."""
    with np.errstate(all="ignore"):
        mean: Any = total / n  # not made an array: NumPy squares scalars and arrays to different last digits
        variance = np.clip(squares - n * mean**2, 0.0, None) / (n - 1)
        return mean, np.sqrt(np.where(n > 1, variance, np.nan) / n)


def mean_over_batches(data: Mapping[str, np.ndarray], total: str, squares: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the samples of all finished mini-batches, from stored sums (batch, ...) by name."""
    done = data["done"] == 1
    return mean_and_standard_error_from_sums(*(data[name][done].sum(axis=0) for name in (total, squares, "samples")))

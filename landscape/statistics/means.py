"""Compute means and their standard errors: one definition for everything summarised in NumPy."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Sum = np.ndarray | np.float64
PARTS = 16  # of the samples, every 16th in one: a function of means has the error of its values over parts
MEMBER_ERROR = "its standard error over members"


def mean_and_standard_error(values: np.ndarray) -> tuple[float, float]:
    """Mean of independent values (n,) and its standard error, std(ddof=1) / sqrt(n); NaN for fewer than two values.

    Infinite values give NaN without a warning.
    """
    with np.errstate(invalid="ignore"):
        error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
        return float(values.mean()), float(error)


def finite_means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of the finite values along the first axis, its standard error and their number; NaN and 0 without any."""
    columns = np.moveaxis(values, 0, -1)
    known = [columns[at][np.isfinite(columns[at])] for at in np.ndindex(columns.shape[:-1])]
    rows = [(*mean_and_standard_error(one), len(one)) if len(one) else (np.nan, np.nan, 0) for one in known]
    mean, error, count = (np.reshape(part, columns.shape[:-1]) for part in zip(*rows, strict=True))
    return mean, error, count


def error_over_parts(values: np.ndarray) -> np.ndarray:
    """Standard error of a mean from those of disjoint parts of its samples, (..., part); NaN for fewer than two."""
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of one part
        return np.asarray(values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1]))


def mean_and_standard_error_from_sums(total: Sum, squares: Sum, n: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same, elementwise, from the sums of n values and of their squares; NaN where n is too small."""
    with np.errstate(all="ignore"):
        mean: Any = total / n  # not made an array: NumPy squares scalars and arrays to different last digits
        variance = np.clip(squares - n * mean**2, 0.0, None) / (n - 1)
        return mean, np.sqrt(np.where(n > 1, variance, np.nan) / n)


def jackknife_error(left: np.ndarray) -> np.ndarray:
    """Standard error of what was computed without one of n independent values each, (n, ...)."""
    n = len(left)
    return np.asarray(np.sqrt((n - 1) / n * ((left - left.mean(axis=0)) ** 2).sum(axis=0)))


def means_by_name(data: Mapping[str, np.ndarray], names: Iterable[str], *, batches: int = 0) -> dict[str, np.ndarray]:
    """Means over the samples of finished units, and errors as `NAME_se`, along the axis of the mini-batches.

    From sums over samples of the values and of their squares, stored as `NAME_sum` and `NAME_square_sum`, (units, ...).
    """
    done = data["done"] == 1
    n = np.where(done, data["samples"], 0.0).sum(axis=batches)
    found: dict[str, np.ndarray] = {}
    for name in names:
        sums = (data[f"{name}_{kind}"] for kind in ("sum", "square_sum"))
        total, squares = (np.where(_expanded(done, of), of, 0.0).sum(axis=batches) for of in sums)
        found[name], found[f"{name}_se"] = mean_and_standard_error_from_sums(total, squares, _expanded(n, total))
    return found


def means_over_batches(data: Mapping[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """The same of mini-batches, and of sums (batch, member, ...) also the mean over the finished members.

    Samples count once for the error, which is that of one member: an upper bound, because the mean over members varies
    less from sample to sample.
    """
    sums = [f"{name}_{kind}" for name in names for kind in ("sum", "square_sum")]
    return means_by_name(mean_over_members(data, "samples", *sums), names)


def mean_over_members(data: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    """`done` and arrays (batch, member, ...) by name as means over the finished members, (batch, ...); others as is."""
    done = data["done"] == 1
    if done.ndim < 2:
        return {name: data[name] for name in ("done", *names)}
    count = done.sum(axis=1)
    means = {"done": (count > 0).astype(data["done"].dtype)}
    for name in names:
        array = np.where(_expanded(done, data[name]), data[name], 0.0)
        means[name] = array.sum(axis=1) / _expanded(np.maximum(count, 1), array[:, 0])
    return means


def error_over_members(data: Mapping[str, np.ndarray], total: str) -> np.ndarray:
    """Standard error, over members, of the mean over samples; from sums (batch, member, ...) of the finished units.

    NaN for fewer than two members.
    """
    done = data["done"] == 1
    finished = done.all(axis=1)  # so that all members have the same samples
    means = data[total][finished].sum(axis=0) / _expanded(data["samples"][finished].sum(axis=0), data[total][0])
    count = len(means)
    if count < 2 or not finished.any():
        return np.full(means.shape[1:], np.nan)
    return np.asarray(means.std(axis=0, ddof=1) / np.sqrt(count))


def _expanded(weights: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Weights with as many dimensions as another array, of which they are the first."""
    return weights.reshape((*weights.shape, *(1,) * (like.ndim - weights.ndim)))

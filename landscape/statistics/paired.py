"""Compare results on the same samples: which of them are, and differences of means with their paired errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from landscape.statistics.intervals import Ends, interval, p_value, quantile

if TYPE_CHECKING:
    import xarray as xr

SAMPLES = ("data_sha256", "samples")  # the attributes that say which samples a result is of


def comparable(results: Sequence[xr.Dataset], also: Callable[[xr.Dataset], Hashable] = lambda data: None) -> list[int]:
    """Positions of finished results on the same samples, the first such set; empty where there is none.

    `also` is what else must be equal.
    """
    alike: dict[Hashable, list[int]] = {}
    for i, data in enumerate(results):
        if (data.variables["done"].values == 1).all() and data.attrs.get("data_sha256"):
            alike.setdefault((*(data.attrs.get(name) for name in SAMPLES), also(data)), []).append(i)
    return next((same for same in alike.values() if len(same) > 1), [])


def mean_difference(values: np.ndarray, other: np.ndarray, *, shares: bool = False) -> tuple[np.ndarray, Ends]:
    """Mean over the last axis of paired values minus others, and the ends of its 95 % interval.

    Of shares of right answers the interval is that of Bonett & Price (2012), with one more sample of either sign: it
    says something even where no two answers differ.
    """
    difference = values - other
    n = difference.shape[-1]
    with np.errstate(invalid="ignore"):  # infinite losses of both
        mean = difference.mean(axis=-1)
        if shares:
            gained, lost = ((np.clip(sign * difference, 0, None).sum(axis=-1) + 1) / (n + 2) for sign in (1, -1))
            half = quantile(n) * np.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
            low, high = gained - lost - half, gained - lost + half
            return mean, (np.clip(np.minimum(low, mean), -1, 1), np.clip(np.maximum(high, mean), -1, 1))
        error = difference.std(axis=-1, ddof=1) / np.sqrt(n) if n > 1 else np.full(mean.shape, np.nan)
    return mean, interval(mean, error, n)


@dataclass(frozen=True)
class Difference:
    """A difference of two estimates; NaN where an error is not known."""

    value: float
    low: float  # ends of the 95 % interval
    high: float
    p: float  # two-sided, of no difference
    method: str  # what the interval and p are by, in words


def paired_t(
    values: np.ndarray, other: np.ndarray, units: str = "samples", shares: np.ndarray | None = None
) -> Difference:
    """Mean of paired values (n,) minus others, by Student's t of their differences.

    `shares` (n,), of sum 1, are the weights of values that are means over different numbers of samples.
    """
    n = len(values)
    weights = np.full(n, 1 / n) if shares is None else shares
    with np.errstate(invalid="ignore"):  # infinite losses of both
        each = values - other
        mean = float(weights @ each) if shares is not None else float(each.mean())
        error = math.sqrt(weights**2 @ (each - mean) ** 2 * n / (n - 1)) if n > 1 else math.nan
    method = f"paired t over {n} {units}"
    if not error > 0:
        return Difference(mean, math.nan, math.nan, 1.0 if n > 1 and mean == 0 else math.nan, method)
    return by_error(mean, error, n, method)


def mcnemar(right: np.ndarray, other: np.ndarray) -> Difference:
    """Share of right answers minus that of another network on the same samples, (n,) zeros and ones each.

    Of shares of the labels or pixels of a sample it is `paired_t`.

    P by the exact test of McNemar (1947) on the samples that one of the two gets right, the interval as in
    `mean_difference`.
    """
    from scipy.special import bdtr

    if not np.isin([right, other], (0, 1)).all():
        return paired_t(right, other)
    value, (low, high) = mean_difference(right, other, shares=True)
    gained, lost = (int(((right - other) == sign).sum()) for sign in (1, -1))
    p = min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5))) if gained + lost else 1.0
    return Difference(float(value), float(low), float(high), p, f"McNemar over {len(right)} samples")


def unpaired(one: tuple[float, float, float], other: tuple[float, float, float], why: str = "") -> Difference:
    """Difference of two estimates as if they were independent; each with its standard error and number of values.

    Welch's t. On common samples, whose noise mostly cancels in the difference, this errs on the side of no difference.
    `why` they are not paired is said. An error of 0, as of a barrier that no point exceeds, is that of no spread and
    not known.
    """
    difference, errors, counts = one[0] - other[0], (one[1], other[1]), (one[2], other[2])
    method = f"errors of both, not paired{f': {why}' if why else ''}"
    if not (errors[0] > 0 and errors[1] > 0):
        return Difference(difference, math.nan, math.nan, 1.0 if difference == 0 else math.nan, "no error is known")
    return by_error(difference, math.hypot(*errors), 1 + degrees_of_freedom(errors, counts), method)


def degrees_of_freedom(errors: tuple[float, float], counts: tuple[float, float]) -> float:
    """Of the difference of two independent estimates from so many values with these standard errors (Welch 1947).

    NaN where a number is not known.
    """
    parts, freedom = np.square(errors), np.subtract(counts, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(parts.sum() ** 2 / (parts**2 / freedom).sum())


def by_error(value: float, error: float, n: float, method: str, ends: tuple[float, float] | None = None) -> Difference:
    """A difference with its standard error over n independent values, by Student's t; `ends`: of a better interval."""
    low, high = interval(value, error, n) if ends is None else ends
    if ends is not None:  # the standard error that such an interval has on the side of 0
        error = float((value - low if value > 0 else high - value) / quantile(n))
    p = float(p_value(value, error, n)) if error > 0 else math.nan
    return Difference(value, float(low), float(high), p, method)

"""Make an interval from an estimate, its standard error and the number of independent values: the one place that does.

All intervals of the project are 95 % intervals. Below four independent values there is none: Student's t is then so
wide, and so sensitive to the shape of a distribution that nobody has seen, that only the values say something.
"""

from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

LEVEL = 0.95
FEWEST = 4  # independent values that have an interval
# Fewest independent values, by what they are, with which coverage was measured (benchmarks/certificates.py).
CERTIFIED = {"samples": 128, "batch": 24, "group": 32, "random vectors": 32, "vector": 8, "image": 18}
UPPER = 0.5 + LEVEL / 2  # the quantile at which a two-sided interval ends
NORMAL = NormalDist().inv_cdf(UPPER)  # standard errors, of many values or on a scale on which errors are normal
Ends = tuple[np.ndarray, np.ndarray]  # lower and upper ends of intervals


def quantile(n: Any, fewest: int = FEWEST) -> np.ndarray:
    """Half the width of an interval over n independent values, in standard errors: Student's t, n - 1 degrees.

    NaN below `fewest`, and where n is not known; `NORMAL` for an infinite number.
    """
    n = np.asarray(n, dtype=float)
    return np.asarray(_quantile(float(n), fewest)) if not n.ndim else _quantiles(n, fewest)


def _quantiles(n: np.ndarray, fewest: int) -> np.ndarray:
    from scipy.special import stdtrit

    return np.where(n >= fewest, stdtrit(np.maximum(n, 2.0) - 1, UPPER), np.nan)


@lru_cache
def _quantile(n: float, fewest: int) -> float:
    return float(_quantiles(np.asarray(n), fewest))


def interval(value: Any, error: Any, n: Any) -> Ends:
    """Ends of the intervals of means, or of other estimates whose error is symmetric, by Student's t."""
    half = quantile(n) * np.asarray(error, dtype=float)
    with np.errstate(invalid="ignore"):  # an infinite value with an infinite error
        return np.asarray(value - half), np.asarray(value + half)


def positive_interval(value: Any, error: Any, n: Any) -> Ends:
    """Ends of the intervals of estimates that cannot be negative: Student's t on the logarithm.

    By the delta method log(value) has the standard error error / value. NaN where the value is not above 0.
    """
    value, error = (np.asarray(part, dtype=float) for part in (value, error))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        factor = np.exp(np.where(value > 0, quantile(n) * error / value, np.nan))
        return value / factor, value * factor


def share_interval(share: Any, error: Any, n: Any) -> Ends:
    """Ends of the intervals of shares, which stay within 0 to 1: Wilson's, with an effective size.

    The size is that of a sample of zeros and ones with the same mean and standard error (Dean & Pagano 2015); where the
    error says nothing, because all values are 0 or all are 1, it is n.
    """
    share, error, n = np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in (share, error, n)))
    spread, wide = share * (1 - share), quantile(n)
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.where((spread > 0) & (error > 0), spread / error**2, n)
        z = wide**2 / size
        middle = (share + z / 2) / (1 + z)
        half = wide * np.sqrt(spread / size + z / (4 * size)) / (1 + z)
        return np.minimum(middle - half, share), np.maximum(middle + half, share)


def percentile_interval(draws: np.ndarray) -> tuple[float, float]:
    """Ends of the interval of an estimate from those of its bootstrap resamples, (draws,)."""
    low, high = np.quantile(draws, [0.025, UPPER])
    return float(low), float(high)


BY_BOUNDS = {"": interval, "share": share_interval, "positive": positive_interval}  # by `Quantity.bounds`


def p_value(value: Any, error: Any, n: Any) -> np.ndarray:
    """Two-sided p of an estimate of 0, by the t test that belongs to `interval`; n as there, but from two values on."""
    from scipy.special import stdtr

    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(2 * stdtr(np.asarray(n, dtype=float) - 1, -np.abs(value) / error))

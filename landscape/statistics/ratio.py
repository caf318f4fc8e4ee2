"""Estimate the ratio of two means, with an interval that stays honest where the denominator may be zero."""

import math
from dataclasses import dataclass

import numpy as np

from landscape.statistics.intervals import FEWEST, quantile


@dataclass(frozen=True)
class Ratio:
    """A ratio with its interval; value, error and upper end are NaN, NaN and infinite where it is not resolved."""

    value: float
    error: float  # standard error by the delta method
    low: float  # lower end of the 95 % interval, at least 0
    high: float
    resolved: bool  # whether the denominator is told apart from 0


def ratio(numerators: np.ndarray, denominators: np.ndarray, *, spread_at_zero: float = math.nan) -> Ratio:
    """The ratio of the means of pseudo-values of a jackknife, (n,) each, that cannot be negative.

    The interval is Fieller's (1954), the ratios r at which numerator - r denominator does not differ from 0 by a t test
    with n - 1 degrees of freedom. It is bounded only where the denominator is told apart from 0 by that test. Where it
    is not, only the lower end is of use: the smallest r that the denominator's largest possible value allows. The
    pseudo-values understate the variance there, because it falls with the estimate; with `spread_at_zero`, the variance
    V of a denominator whose true value is 0, that of one whose value is d is taken as V + 4 sqrt(V / 2) d. For a
    denominator |G|^2 this is an upper bound, since G' S G <= |G|^2 sqrt(tr S^2) and V = 2 tr S^2.
    """
    n = len(numerators)
    over, under = float(numerators.mean()), float(denominators.mean())
    if n < 3 or not math.isfinite(over + under):
        return Ratio(math.nan, math.nan, math.nan, math.nan, False)
    variances = np.cov(np.stack([numerators, denominators])) / n
    squared = float(quantile(n, 3)) ** 2
    # The ends are roots of a r^2 - 2 b r + c.
    a = under**2 - squared * variances[1, 1]
    b = over * under - squared * variances[0, 1]
    c = over**2 - squared * variances[0, 0]
    if a > 0 and under > 0:
        value, half = over / under, math.sqrt(max(b * b - a * c, 0.0))
        spread = variances[0, 0] - 2 * value * variances[0, 1] + value**2 * variances[1, 1]
        low, high = (max((b - half) / a, 0.0), (b + half) / a) if n >= FEWEST else (math.nan, math.nan)
        return Ratio(value, math.sqrt(max(spread, 0.0)) / under, low, high, True)
    if math.isfinite(spread_at_zero):
        a = under**2 - squared * spread_at_zero
        b += 2 * squared * math.sqrt(spread_at_zero / 2) * over
    return Ratio(math.nan, math.nan, _smallest_positive_root(a, b, c) if over > 0 and c > 0 else 0.0, math.inf, False)


def linearised(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Values (n,) whose mean is the ratio of two sums over n parts, and whose spread gives the error of that ratio."""
    with np.errstate(invalid="ignore", divide="ignore"):
        whole = above.sum() / below.sum()
        return np.asarray(whole + (above - whole * below) / below.mean())


def _smallest_positive_root(a: float, b: float, c: float) -> float:
    """Of a r^2 - 2 b r + c with c > 0; 0 if there is none."""
    roots = np.roots([a, -2 * b, c])
    real = roots[np.isreal(roots)].real
    return float(min((root for root in real if root > 0), default=0.0))

"""Ratios of two means with intervals that stay honest where the denominator may be zero, and gradient noise scales."""

import math
from collections.abc import Mapping
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


def alignment(hsic: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """HSIC (n, m) over the geometric mean of those with themselves, (n,), (m,); NaN where one does not vary."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.sqrt(np.abs(one[:, None] * other))
        return np.where((one[:, None] > 0) & (other > 0), hsic / scale, np.nan)


def _smallest_positive_root(a: float, b: float, c: float) -> float:
    """Of a r^2 - 2 b r + c with c > 0; 0 if there is none."""
    roots = np.roots([a, -2 * b, c])
    real = roots[np.isreal(roots)].real
    return float(min((root for root in real if root > 0), default=0.0))


def noise_scales(data: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Both noise scales, or the simple one, of the finished groups whose numbers are finite; empty for less than 3."""
    own = np.diagonal(data["inner"])
    known = np.flatnonzero((data["done"] == 1) & np.isfinite(own) & np.isfinite(data["noise"]))
    if len(known) < 3:
        return {}
    inner = data["inner"][np.ix_(known, known)]
    squares, at_zero = squared_gradient(inner)
    found = _named("simple", "gradient_noise", data["noise"][known], "squared_gradient", squares, at_zero)
    if "curved_noise" in data:
        turned = data["curved_inner"][np.ix_(known, known)]
        curvatures, at_zero = gradient_curvature(turned)
        noise = data["curved_noise"][known]
        found |= _named("curvature", "curved_gradient_noise", noise, "gradient_curvature", curvatures, at_zero)
    return found


def squared_gradient(inner: np.ndarray) -> tuple[np.ndarray, float]:
    """Pseudo-values (n,) of |G|^2, the mean of g_i' g_j over i != j, and its variance if G were 0; `inner` (n, n).

    Without group l the mean is (n D - 2 s_l) / (n - 2), with D that of all groups and s_l the mean of row l.
    """
    n, apart = len(inner), ~np.eye(len(inner), dtype=bool)
    rows = inner.sum(axis=1, where=apart) / (n - 1)
    mean = rows.mean()
    without = (n * mean - 2 * rows) / (n - 2)
    return n * mean - (n - 1) * without, 2 * float(np.mean((inner[apart] - mean) ** 2)) / (n * (n - 1))


def gradient_curvature(turned: np.ndarray) -> tuple[np.ndarray, float]:
    """Pseudo-values (n,) of G' H G, and its variance if G were 0; `turned` (n, n) holds h_i' g_k, NaN for k not in B_i.

    Group l acts by its Hessian, as the mean of row l, and by its gradient, in A_i and in B_i. The latter is the mean of
    column l; by the symmetry of H the former has the same expectation.
    """
    known = np.isfinite(turned)
    if not known.any(axis=0).all() or not known.any(axis=1).all():  # of a few finished groups
        return np.full(len(turned), math.nan), math.nan
    rows, columns = (np.nanmean(turned, axis=axis) for axis in (1, 0))
    mean = rows.mean()
    pseudo = rows + 2 * (columns - columns.mean())
    return pseudo, float(np.nanmean((turned - mean) ** 2)) / len(turned)


def _named(
    kind: str, above: str, numerators: np.ndarray, below: str, denominators: np.ndarray, at_zero: float
) -> dict[str, float]:
    found = ratio(numerators, denominators, spread_at_zero=at_zero)
    root = math.sqrt(len(numerators))
    return {
        kind: found.value, f"{kind}_se": found.error, f"{kind}_low": found.low, f"{kind}_high": found.high,
        f"{kind}_resolved": float(found.resolved),
        below: float(denominators.mean()), f"{below}_se": float(denominators.std(ddof=1)) / root,
        above: float(numerators.mean()), f"{above}_se": float(numerators.std(ddof=1)) / root,
        **{f"{name}_se.n": len(numerators) for name in (kind, below, above)},
    }  # fmt: skip

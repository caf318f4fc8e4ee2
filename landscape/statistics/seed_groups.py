"""Compare groups of networks that differ in their seeds: means, differences, effect sizes, and many tests at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from landscape.statistics import intervals, means, paired
from landscape.statistics.intervals import percentile_interval

FEWEST = 2  # members of a group that say something about its spread
NODES = 200  # of the quadrature


@dataclass(frozen=True)
class Effect:
    """Hedges' g, and the ends of the 95 % interval of the standardised difference of the populations."""

    value: float
    low: float
    high: float


def mean_interval(values: np.ndarray, bounds: str = "") -> tuple[float, float, float]:
    """Mean of independent values (n,) and the ends of its interval, within the bounds of the quantity."""
    mean, error = means.mean_and_standard_error(values) if len(values) else (math.nan, math.nan)
    low, high = intervals.BY_BOUNDS[bounds](mean, error, len(values))
    return mean, float(low), float(high)


def two_groups(values: np.ndarray, other: np.ndarray, units: str = "seeds") -> paired.Difference:
    """Mean of the first minus that of the other; NaN without two of each.

    Welch's t (1947). Two by two it rejects 2 % of equal groups of one spread, but never more than 7 % of others, where
    Student's rejects up to 14.
    """
    value = float(np.mean(values) - np.mean(other)) if len(values) and len(other) else math.nan
    if min(len(values), len(other)) < FEWEST:
        return paired.Difference(value, math.nan, math.nan, math.nan, "")
    (_, error), (_, other_error) = (means.mean_and_standard_error(one) for one in (values, other))
    counts = len(values), len(other)
    method = f"Welch's t over {units}"
    total = math.hypot(error, other_error)
    if not total > 0:
        return paired.Difference(value, math.nan, math.nan, 1.0 if value == 0 else math.nan, method)
    return paired.by_error(value, total, 1 + paired.degrees_of_freedom((error, other_error), counts), method)


def hedges_g(values: np.ndarray, other: np.ndarray) -> Effect:
    """Standardised difference of means with the pooled spread, without its bias in small samples (Hedges 1981).

    The interval inverts the noncentral t distribution (Hedges & Olkin 1985, chapter 5): exact for normal groups of one
    spread. NaN without two of each, or without spread.
    """
    from scipy.special import gammaln

    n, m = len(values), len(other)
    df = n + m - 2
    if min(n, m) < FEWEST:
        return Effect(math.nan, math.nan, math.nan)
    pooled = math.sqrt(((n - 1) * np.var(values, ddof=1) + (m - 1) * np.var(other, ddof=1)) / df)
    if not pooled > 0:
        return Effect(math.nan, math.nan, math.nan)
    d, scale = float(np.mean(values) - np.mean(other)) / pooled, math.sqrt(n * m / (n + m))
    unbiased = math.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) * math.sqrt(2 / df)
    low, high = (_noncentrality(d * scale, df, share) / scale for share in (intervals.UPPER, 1 - intervals.UPPER))
    return Effect(unbiased * d, low, high)


def holm(values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979); NaN counts as no test."""
    found = np.array(values, dtype=float)
    known = np.flatnonzero(~np.isnan(found))
    order = known[np.argsort(found[known], kind="stable")]
    steps = found[order] * np.arange(len(order), 0, -1)
    found[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(order) else steps
    return [float(p) for p in found]


def _noncentrality(t: float, df: float, share: float) -> float:
    """The noncentrality at which so large a share of noncentral t lies below t.

    P(T < t) is the mean of Phi(t s - noncentrality) over s = sqrt(chi^2 / df), by Gauss-Legendre quadrature over the
    quantiles of s: SciPy's own function is NaN for some arguments.
    """
    from scipy.optimize import brentq
    from scipy.special import chdtri, ndtr

    nodes, weights = _quadrature()
    scale = np.sqrt(chdtri(df, (1 - nodes) / 2) / df)

    def excess(noncentrality: float) -> float:
        return float(weights @ ndtr(t * scale - noncentrality)) / 2 - share

    reach = 10 + 10 * abs(t)
    return float(brentq(excess, t - reach, t + reach, xtol=1e-9 * reach))


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(NODES)


DRAWS = 2000  # resamples
FEWEST_NETWORKS = 8  # that have a rank correlation


def kendall(
    x: np.ndarray, y: np.ndarray, groups: Sequence[str] | None = None, *, draws: int = DRAWS
) -> tuple[float, float, float]:
    """Kendall's tau-b (1945) of (n,) and (n,), and the ends of its 95 % interval by the bootstrap over the n pairs.

    With groups, of the pairs of one group only, whose members are resampled within it. A resample leaves out pairs of a
    network with itself, which are ties by construction and would draw tau to zero. Its spread is still 6 to 20 % above
    that of tau, most within small groups, so that the interval is rather too wide than too narrow. NaN for fewer than
    `FEWEST_NETWORKS` or without an order; the ends also where no resample differs: nothing is known of the spread.
    """
    n = len(x)
    if n < FEWEST_NETWORKS:
        return math.nan, math.nan, math.nan
    labels = np.zeros(n, int) if groups is None else np.unique(np.array(groups), return_inverse=True)[1]
    counted = labels[:, None] == labels
    x_order, y_order = (np.sign(np.subtract.outer(one, one)) * counted for one in (x, y))
    products = x_order * y_order, np.abs(x_order), np.abs(y_order)

    def tau(weights: np.ndarray) -> np.ndarray:
        both, x_known, y_known = (((weights @ product) * weights).sum(axis=1) for product in products)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(both / np.sqrt(x_known * y_known))

    value = float(tau(np.ones((1, n)))[0])
    generator, weights = np.random.default_rng(0), np.zeros((draws, n))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        weights[:, members] = generator.multinomial(len(members), np.full(len(members), 1 / len(members)), draws)
    resampled = tau(weights)
    resampled = resampled[np.isfinite(resampled)]
    if math.isnan(value) or not len(resampled) or np.ptp(resampled) == 0:
        return value, math.nan, math.nan
    return value, *percentile_interval(resampled)

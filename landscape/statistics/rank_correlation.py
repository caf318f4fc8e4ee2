"""Kendall's rank correlation of two numbers of networks, with an interval by resampling the networks."""

import math
from collections.abc import Sequence

import numpy as np

from landscape.statistics.intervals import percentile_interval

DRAWS = 2000  # resamples
FEWEST = 8  # networks


def kendall(
    x: np.ndarray, y: np.ndarray, groups: Sequence[str] | None = None, *, draws: int = DRAWS
) -> tuple[float, float, float]:
    """Kendall's tau-b (1945) of (n,) and (n,), and the ends of its 95 % interval by the bootstrap over the n pairs.

    With groups, of the pairs of one group only, whose members are resampled within it. A resample leaves out pairs of a
    network with itself, which are ties by construction and would draw tau to zero. Its spread is still 6 to 20 % above
    that of tau, most within small groups, so that the interval is rather too wide than too narrow. NaN for fewer than
    `FEWEST` networks or without an order; the ends also where no resample differs, so that nothing is known of the
    spread.
    """
    n = len(x)
    if n < FEWEST:
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

"""Compute gradient noise scales with errors and intervals from stored inner products of the gradients of groups."""

import math
from collections.abc import Mapping

import numpy as np

from landscape.statistics.ratio import ratio


def summaries(data: Mapping[str, np.ndarray]) -> dict[str, float]:
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

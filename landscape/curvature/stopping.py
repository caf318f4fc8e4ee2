"""When a search for extreme eigenvalues may stop: which Ritz values are wanted and whether they are known well enough.

Without torch, so that searches on any device can ask with the numbers of one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Which = Literal["LM", "LA", "SA", "both"]


@dataclass(frozen=True)
class StoppingRule:
    """What the wanted values must fulfil before a search ends.

    All methods take the Ritz values in ascending order, (m,), their residuals ||H v - theta v||, (m,), and `floor`, the
    residual that rounding leaves as a share of the largest |value| (1e-6 in single precision): no value has to be
    better than that.

    Args:
        k: how many values are wanted; `both` wants k at each end.
        which: LM largest magnitude, LA largest, SA smallest, both: k largest then k smallest.
        tol: largest estimated relative error of a wanted value, see `estimated_errors`.
        tol_residual: largest relative residual of a wanted value; None does not ask for one.
        ends: also converge the largest and smallest value to this relative residual, or to tol_residual of the largest
            |value|: near zero no relative residual is ever reached. 1.0 disables it.
    """

    k: int
    which: Which = "LM"
    tol: float = 1e-4
    tol_residual: float | None = None
    ends: float = 1.0

    def done(self, values: np.ndarray, residuals: np.ndarray, floor: float) -> bool:
        """Whether the wanted values are known, and the two algebraic ends to the requested residual."""
        size = np.abs(values)
        least = floor * size.max()
        positions = wanted(values, self.k, self.which)
        errors = estimated_errors(values, residuals, positions)
        known = errors <= np.maximum(self.tol * size[positions], least)
        if self.tol_residual is not None:
            known &= residuals[positions] <= np.maximum(self.tol_residual * size[positions], least)
        if not known.all() or (self.which == "LM" and _contested(values, residuals, positions, self.tol, least)):
            return False
        if self.ends >= 1.0:
            return True
        both = np.array([0, len(values) - 1])
        near_zero = max(self.tol_residual or self.tol, floor) * size.max()
        return bool((residuals[both] <= np.maximum(self.ends * size[both], near_zero)).all())


def wanted(values: np.ndarray, k: int, which: Which) -> np.ndarray:
    """Positions of the wanted values in the order of the request, (k,) or fewer."""
    if which == "LM":
        return np.argsort(-np.abs(values), kind="stable")[:k]
    order = np.argsort(values, kind="stable")
    smallest, largest = order[:k], order[::-1][:k]
    return {"LA": largest, "SA": smallest, "both": np.concatenate([largest, smallest])}[which]


def estimated_errors(values: np.ndarray, residuals: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Estimated errors min(r, r^2 / gap) of some of the values, gap the distance to the next Ritz value, (positions,).

    Not bounds: the gap is known as far as the search went.
    """
    distances = np.abs(values[positions][:, None] - values)  # (positions, m)
    distances[np.arange(len(positions)), positions] = np.inf
    own = residuals[positions]
    return np.asarray(np.minimum(own, own**2 / np.maximum(distances.min(axis=1), 1e-300)))


def _contested(values: np.ndarray, residuals: np.ndarray, positions: np.ndarray, tol: float, least: float) -> bool:
    """Whether an unconverged value of the other sign may yet turn out larger than the smallest wanted one."""
    last = values[positions[-1]]
    others = np.setdiff1d(np.flatnonzero(values * last < 0), positions)
    if not len(others):
        return False
    rival = others[np.abs(values[others]).argmax()]
    error = estimated_errors(values, residuals, np.array([rival]))[0]
    return bool(error > max(tol * abs(last), least) and abs(values[rival]) + error > abs(last))

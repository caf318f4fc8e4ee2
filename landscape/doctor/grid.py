"""The grid of a stored surface or line as the rules see it: its centre, its lowest point and the basin around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from landscape.doctor.finding import Result

CENTRED = ("random", "eigen")  # kinds of planes and lines around one checkpoint, the others pass through several
LEVEL = 0.01  # significance level of a minimum that is elsewhere, over all points among which it is searched


@dataclass(frozen=True)
class Grid:
    """Losses over a plane (x, y), or over a line as a plane with one column."""

    x: np.ndarray  # (nx,)
    y: np.ndarray  # (ny,)
    loss: np.ndarray  # (nx, ny), NaN where not finished
    rise_se: np.ndarray  # (nx, ny), standard error of the paired difference from the centre
    loss_se: float  # of the loss at the centre
    centre: tuple[int, int]

    @classmethod
    def of(cls, result: Result) -> Grid | None:
        """The grid of a surface or of the first line; None for other results, and without a finished centre."""
        loss, error, rise = result.values("loss"), result.values("loss_se"), result.values("rise_se")
        if result.probe == "surface" and loss.ndim == 2:
            x, y = result.values("x"), result.values("y")
        elif result.probe == "line" and loss.ndim == 2 and loss.shape[0]:
            x, y, loss, error = result.values("t"), np.zeros(1), loss[0][:, None], error[:1].T
            # Of lines, only the errors of the losses themselves are stored: an upper bound of that of a difference.
            rise = np.hypot(error, error[np.abs(x).argmin()]) if error.shape == loss.shape else np.array([])
        else:
            return None
        if loss.shape != (len(x), len(y)) or not loss.size:
            return None
        centre = int(np.abs(x).argmin()), int(np.abs(y).argmin())
        if not np.isfinite(loss[centre]):
            return None
        rise = rise if rise.shape == loss.shape else np.full(loss.shape, np.nan)
        return cls(x, y, loss, rise, float(error[centre]) if error.shape == loss.shape else float("nan"), centre)

    @classmethod
    def around(cls, result: Result) -> Grid | None:
        """The grid of a surface or line around one checkpoint; others have the range that their checkpoints set."""
        kind = result.attribute("along" if result.probe == "line" else "plane", "random")
        return cls.of(result) if kind in CENTRED else None

    @property
    def at_centre(self) -> float:
        """The loss at the grid point nearest to the checkpoint."""
        return float(self.loss[self.centre])

    @property
    def has_centre(self) -> bool:
        """Whether a point lies at the weights themselves."""
        return bool(max(abs(self.x[self.centre[0]]), abs(self.y[self.centre[1]])) <= 1e-9 * self.reach)

    @property
    def reach(self) -> float:
        """The greatest distance along an axis."""
        return float(max(np.abs(self.x).max(), np.abs(self.y).max()))

    @property
    def lowest(self) -> tuple[tuple[int, int], float, bool]:
        """The lowest point, how far it is below the centre, and whether that is more than noise.

        The lowest of m points is judged at a level of 1 % divided by m (Bonferroni).
        """
        known = np.where(np.isfinite(self.loss), self.loss, np.inf)
        i, j = (int(k) for k in np.unravel_index(int(known.argmin()), known.shape))
        below = self.at_centre - float(known[i, j])
        clear = below > ndtri(1 - LEVEL / known.size) * self.rise_se[i, j]
        return (i, j), below, bool(clear and below > 0)

    def on_border(self, i: int, j: int) -> bool:
        """Whether a point lies on the edge of the grid."""
        return i in (0, len(self.x) - 1) or (len(self.y) > 1 and j in (0, len(self.y) - 1))

    def nearest(self, count: int, values: np.ndarray | None = None) -> np.ndarray:
        """The losses, or other values of the grid, at the `count` points per axis that are nearest to the centre."""
        rows, columns = (np.sort(np.argsort(np.abs(axis), kind="stable")[:count]) for axis in (self.x, self.y))
        return np.asarray((self.loss if values is None else values)[np.ix_(rows, columns)])

    def basin(self, level: float) -> float:
        """How far from the centre the loss reaches a level, the median over the ends of the axes; NaN if nowhere.

        Between the grid points a quadratic from the centre is assumed.
        """
        i, j = self.centre
        arms = [(self.x[i:], self.loss[i:, j]), (self.x[i::-1], self.loss[i::-1, j])]
        if len(self.y) > 1:
            arms += [(self.y[j:], self.loss[i, j:]), (self.y[j::-1], self.loss[i, j::-1])]
        radii = []
        for at, loss in arms:
            above = np.flatnonzero(~(loss < level))
            if above.size and above[0] > 0:
                k = above[0]
                inner, outer = abs(at[k - 1] - at[0]), abs(at[k] - at[0])
                low, high = loss[k - 1] - self.at_centre, loss[k] - self.at_centre
                share = np.sqrt(max(level - self.at_centre - low, 0.0) / (high - low)) if np.isfinite(high) else 0.5
                radii.append(inner + share * (outer - inner))
        return float(np.median(radii)) if radii else float("nan")


def at_weights(result: Result, name: str) -> float:
    """Loss or accuracy at the checkpoint itself: of a grid or line its centre, of a run its last snapshot; else NaN."""
    values, grid = result.values(name), Grid.of(result)
    if grid is not None and grid.has_centre and values.ndim == 2:
        i, j = grid.centre
        return float(values[i, j] if result.probe == "surface" else values[0, i])
    return float(values[-1]) if result.probe == "trajectory" and values.size else math.nan

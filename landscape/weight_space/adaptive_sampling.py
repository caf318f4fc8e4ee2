"""A surface from few of its points: which to evaluate, from coarse to fine, and the others by interpolation.

Everything here follows from the stored values and a seed, so that a stopped preview goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from landscape.probe import derived_seed

Points = np.ndarray  # flat positions in the grid, int64


@dataclass(frozen=True)
class Design:
    """How many points, and how they are chosen.

    Args:
        coarse: points per axis of the first, even grid.
        step: points of a round, where two interpolants of the log loss disagree most.
        points: evaluated by choice, the coarse grid included.
        hold_outs: drawn at random from the rest and predicted before they join: 0.95^59 < 0.05, so their greatest
            error bounds 95 % of the errors with 95 % confidence.
    """

    coarse: int = 9
    step: int = 20
    points: int = 281
    hold_outs: int = 59

    @property
    def total(self) -> int:
        """Points evaluated unless the hold-outs say that more are needed."""
        return self.points + self.hold_outs


DESIGN = Design()


@dataclass(frozen=True)
class Step:
    """What comes next.

    Args:
        points: to evaluate now; empty when the rest can be interpolated.
        error: the greatest relative error of the loss at the hold-outs, NaN before they are known.
        fallback: why all points are evaluated, else empty.
    """

    points: Points
    error: float = float("nan")
    fallback: str = ""


def step(
    axes: tuple[np.ndarray, np.ndarray],
    loss: np.ndarray,
    evaluated: np.ndarray,
    *,
    tolerance: float,
    seed: int,
    design: Design = DESIGN,
) -> Step:
    """The points to evaluate next, by going through the rounds again with the values at hand.

    Args:
        axes: coordinates along x and y.
        loss: (x, y).
        evaluated: (x, y), where it is known.
        tolerance: of the hold-outs' error; beyond it every point is evaluated.
        seed: of the hold-outs.
        design: see `Design`.
    """
    grid, known, values = coordinates(axes), evaluated.ravel(), loss.ravel()
    everything = np.arange(len(grid))
    error = float("nan")
    if loss.size <= design.total or min(loss.shape) < 3:  # nothing to save, or too narrow for an interpolant
        return Step(everything[~known], fallback="the grid is too small to save any")
    chosen = _coarse(loss.shape, design.coarse)
    for fresh, held_out in _rounds(grid, chosen, values, known, seed, design):
        if not known[fresh].all():
            return Step(fresh[~known[fresh]])
        if not np.isfinite(values[fresh]).all():  # no interpolant passes through an infinite value
            return Step(everything[~known], fallback="the loss is not finite everywhere")
        if held_out is not None:
            predicted = interpolated(grid[held_out], values[held_out], grid[fresh])
            error = float(np.max(np.abs(predicted / values[fresh] - 1))) if len(fresh) else 0.0
    if error <= tolerance:
        return Step(everything[:0], error)
    return Step(everything[~known], error, f"hold-outs err by up to {error:.1%}, more than {tolerance:.1%}")


def _rounds(
    grid: np.ndarray, chosen: Points, values: np.ndarray, known: np.ndarray, seed: int, design: Design
) -> Iterator[tuple[Points, Points | None]]:
    """Rounds of points; the last are the hold-outs, with the points to predict them from.

    A round is drawn only after the one before it is known.
    """
    yield chosen, None
    while len(chosen) < min(design.points, len(grid)):
        rest = np.setdiff1d(np.arange(len(grid)), chosen)
        count = min(design.step, design.points - len(chosen), len(rest))
        fresh = _spread(grid, rest, _disagreement(grid, chosen, values, rest), chosen, count)
        yield fresh, None
        chosen = np.union1d(chosen, fresh)
    rest = np.setdiff1d(np.arange(len(grid)), chosen)
    generator = np.random.default_rng(derived_seed(seed, "hold-outs"))
    yield np.sort(generator.permutation(rest)[: design.hold_outs]), chosen


def coordinates(axes: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Grid points in C order as shares of the axes, (n, 2), each axis from -1 to 1."""
    shares = [2 * (axis - axis[0]) / (axis[-1] - axis[0]) - 1 for axis in axes]
    return np.stack([part.ravel() for part in np.meshgrid(*shares, indexing="ij")], axis=1)


def interpolated(at: np.ndarray, values: np.ndarray, wanted: np.ndarray, *, kernel: str = "cubic") -> np.ndarray:
    """Radial basis functions through positive values on a log scale, with quadratics exact; plain where some are not.

    On the log scale because a loss spans orders of magnitude: on the loss itself the greatest error is 70 times larger.
    """
    positive = bool((values > 0).all())
    found = _radial(at, np.log(values) if positive else values, wanted, kernel)
    return np.exp(found) if positive else found


def filled(
    axes: tuple[np.ndarray, np.ndarray], quantities: Mapping[str, np.ndarray], evaluated: np.ndarray
) -> dict[str, np.ndarray]:
    """Quantities with every point: what was evaluated as it is, the rest interpolated.

    Losses and their errors on a log scale, shares and l2 as they are (l2 is a quadratic, which is met exactly).
    """
    grid, known = coordinates(axes), evaluated.ravel().astype(bool)
    found = {}
    for name, array in quantities.items():
        values = array.ravel().copy()
        sound = known & np.isfinite(values)
        if sound.sum() >= 6:
            method = _radial if name in ("accuracy", "l2") else interpolated
            values[~known] = method(grid[sound], values[sound], grid[~known])
        if name == "accuracy":
            values = np.clip(values, 0.0, 1.0)
        found[name] = values.reshape(array.shape)
    return found


def _radial(at: np.ndarray, values: np.ndarray, wanted: np.ndarray, kernel: str = "cubic") -> np.ndarray:
    from scipy.interpolate import RBFInterpolator

    return np.asarray(RBFInterpolator(at, values, kernel=kernel, degree=2)(wanted))


def _coarse(shape: tuple[int, ...], count: int) -> Points:
    """An even grid of at most `count` points per axis with its ends and, on odd axes, its centre."""
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)) for n in shape)
    found: Points = rows[:, None] * shape[1] + columns
    return found.ravel()


def _disagreement(grid: np.ndarray, chosen: Points, values: np.ndarray, rest: Points) -> np.ndarray:
    one, other = (
        interpolated(grid[chosen], values[chosen], grid[rest], kernel=kernel)
        for kernel in ("cubic", "thin_plate_spline")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(np.abs(one - other) / np.maximum(np.abs(one), 1e-300), posinf=1e300))


def _spread(grid: np.ndarray, rest: Points, score: np.ndarray, chosen: Points, count: int) -> Points:
    """The highest scores that keep a distance: each taken point damps its neighbourhood."""
    score = score.copy()
    distance = np.sqrt(((grid[rest][:, None] - grid[chosen][None]) ** 2).sum(axis=2)).min(axis=1)
    taken = []
    for _ in range(count):
        best = int(np.argmax(score * distance))
        taken.append(rest[best])
        score[best] = -1.0
        distance = np.minimum(distance, np.sqrt(((grid[rest] - grid[rest[best]]) ** 2).sum(axis=1)))
    return np.sort(np.array(taken, dtype=np.int64))

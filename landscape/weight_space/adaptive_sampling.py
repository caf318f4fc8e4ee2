"""Preview a surface: choose points to evaluate, from coarse to fine, and interpolate the others.

Everything follows from stored values and a seed, so that a preview that was stopped continues as if it had not been.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from landscape.probe import Stage, derived_seed

_log = logging.getLogger(__name__)
Points = np.ndarray  # flat positions in the grid, int64


@dataclass(frozen=True)
class Design:
    """How many points are evaluated, and how they are chosen."""

    coarse: int = 9  # points per axis of the first, even grid
    step: int = 20  # points per round, placed where two interpolants of the log loss disagree most
    points: int = 281  # number chosen in this way, the coarse grid included
    # random points among the others, predicted before they are used: 0.95^59 < 0.05, so their largest error bounds
    # 95 % of all errors with 95 % confidence
    hold_outs: int = 59

    @property
    def total(self) -> int:
        """Number of evaluated points, unless the hold-outs show that all are needed."""
        return self.points + self.hold_outs


DESIGN = Design()


@dataclass(frozen=True)
class Preview:
    """Points from coarse to fine, the others interpolated, the error measured at hold-outs."""

    tolerance: float  # relative error of the loss at the hold-outs beyond which every point is evaluated
    seed: int  # of the hold-outs

    def stage(self, data: Mapping[str, np.ndarray], quantities: Iterable[str]) -> Stage:
        """The points to evaluate next; if there are none, all quantities of the others by interpolation."""
        following, evaluated = self._step(data), data["evaluated"] == 1
        if following.fallback and len(following.points):
            _log.info("preview: every point is evaluated, because %s", following.fallback)
        if len(following.points):
            return Stage([tuple(map(int, np.unravel_index(p, evaluated.shape))) for p in following.points], {})
        known = {name: data[name] for name in quantities if name not in ("evaluated", "deviates", "n")}
        unknown = {name: np.full(evaluated.shape, np.nan) for name in ("deviates", "n")}
        interpolated = interpolate_missing((data["x"], data["y"]), known, evaluated)
        return Stage([], {**unknown, **interpolated, "evaluated": np.zeros(evaluated.shape)})

    def summaries(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Error at the hold-outs and number of evaluations."""
        return {"hold_out_error": self._step(data).error, "evaluations": float((data["evaluated"] == 1).sum())}

    def _step(self, data: Mapping[str, np.ndarray]) -> "Step":
        axes, evaluated = (data["x"], data["y"]), data["evaluated"] == 1
        return step(axes, data["loss"], evaluated, tolerance=self.tolerance, seed=self.seed)


@dataclass(frozen=True)
class Step:
    """What a preview does next."""

    points: Points  # to evaluate now; empty when the others can be interpolated
    error: float = float("nan")  # largest relative error of the loss at the hold-outs, NaN before they are evaluated
    fallback: str = ""  # why all points have to be evaluated, else empty


def step(
    axes: tuple[np.ndarray, np.ndarray],
    loss: np.ndarray,
    evaluated: np.ndarray,
    *,
    tolerance: float,
    seed: int,
    design: Design = DESIGN,
) -> Step:
    """The points to evaluate next, found by replaying the rounds with the losses stored where `evaluated`, (x, y)."""
    grid, known, values = coordinates(axes), evaluated.ravel(), loss.ravel()
    everything = np.arange(len(grid))
    error = float("nan")
    if loss.size <= design.total or min(loss.shape) < 3:  # nothing to save, or too narrow for an interpolant
        return Step(everything[~known], fallback="the grid is too small to save any")
    for fresh, predictors in _rounds(grid, loss.shape, values, seed, design):
        if not known[fresh].all():
            return Step(fresh[~known[fresh]])
        if not np.isfinite(values[fresh]).all():  # no interpolant passes through an infinite value
            return Step(everything[~known], fallback="the loss is not finite everywhere")
        if predictors is not None:
            predicted = interpolated(grid[predictors], values[predictors], grid[fresh])
            error = float(np.max(np.abs(predicted / values[fresh] - 1))) if len(fresh) else 0.0
    if error <= tolerance:
        return Step(everything[:0], error)
    return Step(everything[~known], error, f"hold-outs err by up to {error:.1%}, more than {tolerance:.1%}")


def _rounds(
    grid: np.ndarray, shape: tuple[int, ...], values: np.ndarray, seed: int, design: Design
) -> Iterator[tuple[Points, Points | None]]:
    """Rounds of points; the last are the hold-outs, with the points to predict them from.

    A round is chosen only after the one before it is evaluated.
    """
    chosen = _coarse(shape, design.coarse)
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
    """Grid points in C order, (n, 2), with each axis scaled to [-1, 1]."""
    scaled = [2 * (axis - axis[0]) / (axis[-1] - axis[0]) - 1 for axis in axes]
    return np.stack([part.ravel() for part in np.meshgrid(*scaled, indexing="ij")], axis=1)


def interpolated(at: np.ndarray, values: np.ndarray, wanted: np.ndarray, *, kernel: str = "cubic") -> np.ndarray:
    """Interpolate the logarithms by radial basis functions, exact for quadratics; the values if some are not positive.

    A loss spans orders of magnitude: without the logarithm the largest error is 70 times larger.
    """
    positive = bool((values > 0).all())
    predicted = _radial(at, np.log(values) if positive else values, wanted, kernel)
    return np.exp(predicted) if positive else predicted


def interpolate_missing(
    axes: tuple[np.ndarray, np.ndarray], quantities: Mapping[str, np.ndarray], evaluated: np.ndarray
) -> dict[str, np.ndarray]:
    """Quantities (x, y, ...) at every point: evaluated ones unchanged, the others interpolated.

    Losses and their errors on a log scale, accuracy and l2 without (l2 is a quadratic, which is reproduced exactly).
    """
    grid, known = coordinates(axes), evaluated.ravel().astype(bool)
    complete = {}
    for name, array in quantities.items():
        values = array.reshape(len(grid), *array.shape[2:]).copy()
        usable = known & np.isfinite(values).reshape(len(grid), -1).all(axis=1)
        if usable.sum() >= 6:
            method = _radial if name in ("accuracy", "l2") else interpolated
            values[~known] = method(grid[usable], values[usable], grid[~known])
        if name == "accuracy":
            values = np.clip(values, 0.0, 1.0)
        complete[name] = values.reshape(array.shape)
    return complete


def _radial(at: np.ndarray, values: np.ndarray, wanted: np.ndarray, kernel: str = "cubic") -> np.ndarray:
    from scipy.interpolate import RBFInterpolator

    return np.asarray(RBFInterpolator(at, values, kernel=kernel, degree=2)(wanted))


def _coarse(shape: tuple[int, ...], count: int) -> Points:
    """An even grid of at most `count` points per axis with both ends and, on odd axes, the centre."""
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)) for n in shape)
    points: Points = rows[:, None] * shape[1] + columns
    return points.ravel()


def _disagreement(grid: np.ndarray, chosen: Points, values: np.ndarray, rest: Points) -> np.ndarray:
    """Relative difference of two interpolants."""
    kernels = ("cubic", "thin_plate_spline")
    one, other = (interpolated(grid[chosen], values[chosen], grid[rest], kernel=kernel) for kernel in kernels)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(np.abs(one - other) / np.maximum(np.abs(one), 1e-300), posinf=1e300))


def _spread(grid: np.ndarray, rest: Points, score: np.ndarray, chosen: Points, count: int) -> Points:
    """The points with the highest score times distance to all that are chosen, which spreads them."""
    score = score.copy()
    distance = np.sqrt(((grid[rest][:, None] - grid[chosen][None]) ** 2).sum(axis=2)).min(axis=1)
    taken = []
    for _ in range(count):
        best = int(np.argmax(score * distance))
        taken.append(rest[best])
        score[best] = -1.0
        distance = np.minimum(distance, np.sqrt(((grid[rest] - grid[rest[best]]) ** 2).sum(axis=1)))
    return np.sort(np.array(taken, dtype=np.int64))

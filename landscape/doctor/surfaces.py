"""Rules of surfaces, lines and trajectories: their range, centre, exactness, barriers and batch-norm statistics."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from landscape.doctor.finding import Finding, Grid, Result, Severity, found, look_at_inputs, measure_again, more_samples
from landscape.statistics import intervals, rounding, stored

FIT = 5  # grid points per axis that the stored curvature is fitted to, see `surface_summary.curvature`
NEXT = 3  # of which those next to the centre are
WIDTH = 2.0  # a basin is resolved if the suggested range is about this times as wide as it
FEW = 9  # points per axis, of which the five in the centre are half of such a range or more
ENOUGH = 17  # of which they are a quarter
NEARLY = 0.9  # of the range: less than that changes little


def minimum_at_the_edge(result: Result) -> Iterator[Finding]:
    """The lowest point lies on the border of the grid and is lower than the centre: the range misses the basin.

    The rise of a point above the centre has a paired standard error (`rise_se`). The lowest of m points is judged at a
    level of 1 % divided by m (Bonferroni), so that noise alone does this in one of a hundred surfaces. A checkpoint
    whose loss is above that of guessing has no basin: see `accuracy.at_chance`.
    """
    if (grid := Grid.around(result)) is None or (
        grid.has_centre and grid.at_centre >= math.log(result.classes or math.inf)
    ):
        return
    (i, j), below, clear = grid.lowest
    if clear and grid.on_border(i, j):
        size = max(abs(grid.x[i]), abs(grid.y[j]))
        yield found(
            "minimum-at-edge", "wrong", result,
            f"the lowest loss, {grid.loss[i, j]:.4g}, lies on the edge of the grid at ({grid.x[i]:.3g}, "
            f"{grid.y[j]:.3g}), {below:.3g} below the centre: the range misses the basin",
            measure_again(result, f"use a range of at least {2 * size:.3g}", range=f"{2 * size:.3g}"),
        )  # fmt: skip


def minimum_elsewhere(result: Result) -> Iterator[Finding]:
    """A trained network lies at a minimum of its training loss; another point of the plane is clearly lower.

    Reported from two grid cells away, because a minimum next to the centre is within the resolution of the grid, at
    the level of `minimum_at_the_edge`, and where the difference exceeds the sampling error of the loss itself. Common
    causes: other preprocessing than in training, weights that are not trained, batch-norm statistics of other weights.
    """
    if (grid := Grid.around(result)) is None or result.probe != "surface" or result.spec.get("split") == "test":
        return
    (i, j), below, clear = grid.lowest
    away = max(abs(i - grid.centre[0]), abs(j - grid.centre[1]))
    if clear and away >= 2 and not grid.on_border(i, j) and below > grid.loss_se:
        yield found(
            "minimum-elsewhere", "suspicious", result,
            f"the loss at ({grid.x[i]:.3g}, {grid.y[j]:.3g}) is {below:.3g} below that of the checkpoint "
            f"({grid.at_centre:.4g}): it is not at a minimum of this loss on these samples",
            "check that --mean and --std are those of training; "
            f"{result.evaluation} --split train shows the accuracy with the checkpoint's own",
        )  # fmt: skip


def too_wide(result: Result) -> Iterator[Finding]:
    """The points nearest to the centre are already outside the basin: every panel saturates around one grid point.

    Outside means a loss above that of guessing, log K for K classes: there the network knows nothing. Suspicious if the
    majority of the 8 points next to the centre (of a line, the 2) is: then the basin is narrower than the distance of
    two points, and nothing of its shape is seen. A note if only the inner 5 x 5 points are not in it, to which the
    stored curvature is fitted (`surface_summary.curvature`): the figure shows the basin, coarsely.
    """
    if (grid := Grid.around(result)) is None or not result.classes or len(grid.x) < FIT:
        return
    chance = math.log(result.classes)
    if not grid.at_centre < chance or np.isnan(grid.nearest(FIT)).any():
        return
    levels: tuple[tuple[int, str, Severity, str], ...] = (
        (NEXT, "too-wide", "suspicious", "too wide for this grid"),
        (FIT, "coarse-basin", "note", "wide for this grid: the curvature fitted to these points is not the basin's"),
    )
    for size, rule, severity, said in levels:
        near = grid.nearest(size)
        outside, others = int((near >= chance).sum()), near.size - 1
        if 2 * outside > others:
            range_, points = WIDTH * grid.basin(chance), len(grid.x)
            finer = points < FEW or not range_ <= NEARLY * grid.reach
            changes: dict[str, Any] = {"resolution": max(ENOUGH, 2 * points - 1)} if finer else {}
            if range_ < grid.reach:
                changes["range"] = f"{range_:.2g}"
            named = " and ".join(f"{name} {value}" for name, value in changes.items())
            yield found(
                rule, severity, result,
                f"the loss is above that of guessing, log {result.classes} = {chance:.3g}, at {outside} of the "
                f"{others} grid points around the centre: the range {grid.reach:.3g} is {said}",
                measure_again(result, f"use {named}", **changes),
            )  # fmt: skip
            return


def too_narrow(result: Result) -> Iterator[Finding]:
    """The loss varies over the whole grid by less than the sampling error of its own level: the surface looks flat.

    Differences between points are known better than the level (the errors are paired), but a rise that is smaller than
    the error of the loss says nothing about the basin, only about the curvature at its bottom.
    """
    if (grid := Grid.around(result)) is None or not result.complete:
        return
    finite = grid.loss[np.isfinite(grid.loss)]
    if not finite.size or not grid.loss_se > 0:
        return
    spread = float(finite.max() - finite.min())
    if spread < grid.loss_se:
        # The loss rises about quadratically: to where it reaches that of guessing, or to the default range.
        wanted = math.log(result.classes) - grid.at_centre if result.classes else math.inf
        widest = max(1.0, 10 * grid.reach)
        value = f"{min(widest, WIDTH * grid.reach * math.sqrt(max(wanted, 0.0) / max(spread, 1e-12))) or widest:.2g}"
        yield found(
            "too-narrow", "suspicious", result,
            f"the loss varies by {spread:.2g} over the grid, less than its standard error of {grid.loss_se:.2g}: "
            f"the range {grid.reach:.3g} is too narrow to show the basin",
            measure_again(result, f"use range {value}", range=value),
        )  # fmt: skip


def no_rise(result: Result) -> Iterator[Finding]:
    """The 95 % interval of every height holds zero: too few samples for the shape of this surface."""
    heights = result.values("height")
    halves = stored.half_width(result.data, "height") if heights.size else heights
    known = np.isfinite(heights) & np.isfinite(halves) & (halves > 0)
    if result.probe == "surface" and known.any() and (np.abs(heights[known]) < halves[known]).all():
        last = np.flatnonzero(known)[-1]
        yield found(
            "height-unknown", "suspicious", result,
            f"the height of the loss at radius {result.values('radius')[last]:g} is "
            f"{rounding.plus_minus(heights[last], halves[last])} on {result.samples} samples: not told apart from flat",
            more_samples(result, float(halves[last] / max(abs(heights[last]), 1e-300))),
        )  # fmt: skip


def no_centre(result: Result) -> Iterator[Finding]:
    """An even number of points has none at the weights themselves: the lowest point of the figure is not the network's.

    Curvature and heights are then relative to an interpolated value. Planes through checkpoints have no such centre.
    """
    if (grid := Grid.around(result)) is None or result.probe != "surface":
        return
    if not grid.has_centre:
        odd = ",".join(str(n + 1 - n % 2) for n in grid.loss.shape)
        yield found(
            "no-centre", "suspicious", result,
            f"the grid of {' x '.join(map(str, grid.loss.shape))} has no point at the checkpoint itself",
            measure_again(result, "use odd numbers of points", resolution=odd),
        )  # fmt: skip


def not_finite(result: Result) -> Iterator[Finding]:
    """Losses that are infinite or not numbers leave holes in the figure and are left out of every summary."""
    loss = result.values("loss")
    if result.probe not in ("surface", "line", "convexity") or "done" not in result.data or not loss.size:
        return
    done = result.data.variables["done"].values == 1
    holes = int((~np.isfinite(loss[done])).sum())
    if holes:
        reach = max((float(np.abs(result.values(axis)).max()) for axis in "xyt" if axis in result.data), default=1.0)
        yield found(
            "not-finite", "suspicious", result,
            f"the loss is not finite at {holes} of {int(done.sum())} points",
            measure_again(result, "use a smaller range", range=f"{reach / 2:.3g}")
            if holes < done.sum()
            else look_at_inputs(result),
            cause=result.probe,
        )  # fmt: skip


def clipped(result: Result) -> Iterator[Finding]:
    """`--cap` stopped points that the stored curvature is fitted to, so that it is that of rough values."""
    cap, grid = result.parameters.get("cap"), Grid.around(result)
    used = result.values("n")
    if cap is None or grid is None or used.shape != grid.loss.shape or min(used.shape) < FIT:
        return
    near = grid.nearest(FIT, used)
    cut = int((near < result.samples).sum())
    if cut:
        higher = f"{2 * float(np.nanmax(grid.nearest(FIT))):.2g}"
        yield found(
            "clipped", "suspicious", result,
            f"--cap {cap:g} stopped {cut} of the {FIT * FIT} inner points, to which the curvature is fitted, after a "
            f"part of their samples (as few as {int(near.min())} of {result.samples})",
            measure_again(result, "use a higher cap or a smaller range", cap=higher),
        )  # fmt: skip


def rough_preview(result: Result) -> Iterator[Finding]:
    """The measured error of the interpolation exceeds the tolerance that was asked for."""
    error, tolerance = result.number("hold_out_error"), float(result.parameters.get("tolerance", math.inf))
    evaluated = result.values("evaluated")
    if error > tolerance and evaluated.size and (evaluated == 0).any():
        yield found(
            "rough-preview", "suspicious", result,
            f"interpolated points are wrong by up to {error:.0%} at the hold-outs, --tolerance allows {tolerance:.0%}",
            measure_again(result, "measure every point, without --preview", preview=None),
        )  # fmt: skip


def inexact_pass(result: Result) -> Iterator[Finding]:
    """A faster execution mode differs from the default one by more than the sampling error at its control points.

    `deviation_95` is in standard errors of the loss: the mode changes the loss by more than its 95 % interval.
    """
    deviation = result.number("deviation_95")
    if deviation > intervals.NORMAL:
        yield found(
            "inexact-pass", "suspicious", result,
            f"--precision {result.parameters.get('precision')} moves the loss by {deviation:.1f} standard errors "
            "(95th percentile of the control points)",
            measure_again(result, "use the default precision", precision=None, memory_format=None, compile=None),
        )  # fmt: skip


ROUNDING = 1e-3  # relative difference of two losses of the same samples that no float32 rounding explains


def frozen_ends(result: Result) -> Iterator[Finding]:
    """The other checkpoint has another loss on the line than by itself: its batch-norm statistics are not its own.

    `end_loss` is the other checkpoint's own loss and `end_excess` the difference of the line's end from it, on the same
    samples: with frozen statistics any difference beyond rounding (0.1 %) is due to them, and between the ends it is
    larger. Recalibrated statistics are an estimate that was asked for, and judged by the 95 % interval of the loss.
    """
    own, excess = result.values("end_loss"), result.values("end_excess")
    loss, t = result.values("loss"), result.values("t")
    if not own.size or own.shape != excess.shape or not loss.size or not (t == 1.0).any():
        return
    at_end = stored.half_width(result.data, "loss")[:, int(np.flatnonzero(t == 1.0)[0])]
    for name, itself, more, half in zip(result.names("name"), own, excess, at_end, strict=True):
        if abs(more) > (ROUNDING * abs(itself) if result.attribute("statistics") == "frozen" else half):
            yield found(
                "frozen-statistics", "wrong", result,
                f"{name.removeprefix('towards ')} has the loss {itself + more:.4g} on the line and {itself:.4g} by "
                f"itself: batch-norm statistics are {result.attribute('statistics')}",
                measure_again(result, "interpolate or recalibrate the statistics", bn="recalibrate:8"),
            )  # fmt: skip


def frozen_corners(result: Result) -> Iterator[Finding]:
    """As `frozen_ends`, for a plane through checkpoints: `path_loss` and `path_excess` of each."""
    own, excess = result.values("path_loss"), result.values("path_excess")
    if not own.size or own.shape != excess.shape or result.attribute("statistics") != "frozen":
        return
    k = int(np.abs(excess).argmax())
    if abs(excess[k]) > ROUNDING * abs(own[k]):
        yield found(
            "frozen-statistics", "wrong", result,
            f"{result.names('path_name')[k] or result.label} has the loss {own[k] + excess[k]:.4g} on the plane and "
            f"{own[k]:.4g} by itself: batch-norm statistics are {result.attribute('statistics')}",
            measure_again(result, "interpolate the statistics", bn=None),
        )  # fmt: skip


def frozen_path(result: Result) -> Iterator[Finding]:
    """Snapshots on the principal plane keep the batch-norm statistics of the final weights (`bn` frozen).

    The loss on the plane differs from a snapshot's own because the snapshot lies off the plane, or because of the
    statistics. A path is drawn from the highest losses down to the lowest: where a point of it on the plane is twice
    as high as the highest loss of any snapshot, the drawn surface is not the one that training walked on.
    """
    if result.probe != "trajectory" or result.parameters.get("bn", "frozen") != "frozen":
        return
    loss, plane = result.values("loss"), result.values("plane_loss")
    if not loss.size or plane.shape != loss.shape or "plane_excess" not in result.data or not np.isfinite(plane).any():
        return
    worst = int(np.nanargmax(plane))
    highest = float(np.nanmax(loss))
    if plane[worst] - highest > stored.half_width(result.data, "plane_excess")[worst] and plane[worst] > 2 * highest:
        names = result.names("name") or [str(k) for k in range(len(loss))]
        yield found(
            "frozen-statistics", "suspicious", result,
            f"on the plane snapshot {names[worst]} has the loss {plane[worst]:.4g}, by itself {loss[worst]:.4g}, and "
            f"no snapshot more than {highest:.4g}: batch-norm statistics there are those of the final weights",
            measure_again(result, "recalibrate the statistics", bn="recalibrate:8"),
        )  # fmt: skip


def barrier_unknown(result: Result) -> Iterator[Finding]:
    """The barrier's 95 % interval holds zero: a note, because the absence of a barrier is a result too."""
    if not (barriers := result.values("barrier").ravel()).size:
        return
    halves = stored.half_width(result.data, "barrier").ravel()
    unknown = np.flatnonzero(np.abs(barriers) < halves)
    if unknown.size:
        barrier, half = min(
            zip(barriers[unknown], halves[unknown], strict=True), key=lambda b: b[1] / max(abs(b[0]), 1e-12)
        )
        which = (
            "the barrier {} is" if barriers.size == 1 else f"{unknown.size} of {barriers.size} barriers, as {{}}, are"
        )
        yield found(
            "barrier-unknown", "note", result,
            f"{which.format(rounding.plus_minus(barrier, half))} not told apart from zero on {result.samples} samples",
            more_samples(result, half / max(abs(barrier), 1e-12)),
        )  # fmt: skip


def short_path(result: Result) -> Iterator[Finding]:
    """Three snapshots always lie in a plane, and two on a line: the explained variance is 100 % by construction."""
    count = len(result.values("radius"))
    if result.probe == "trajectory" and 0 < count <= 3:
        yield found(
            "short-path", "suspicious", result,
            f"{count} snapshots always lie in one plane: that the plane explains the whole path says nothing",
            "measure a run with more snapshots, written by: landscape train --snapshots N",
        )  # fmt: skip

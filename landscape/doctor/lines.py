"""Rules of lines, planes through checkpoints and trajectories: batch-norm statistics, barriers and paths."""

from collections.abc import Iterator

import numpy as np

from landscape.doctor.finding import Finding, Result, found, measure_again, more_samples
from landscape.statistics.rounding import plus_minus
from landscape.statistics.stored import half_width

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
    at_end = half_width(result.data, "loss")[:, int(np.flatnonzero(t == 1.0)[0])]
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
    if plane[worst] - highest > half_width(result.data, "plane_excess")[worst] and plane[worst] > 2 * highest:
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
    halves = half_width(result.data, "barrier").ravel()
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
            f"{which.format(plus_minus(barrier, half))} not told apart from zero on {result.samples} samples",
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

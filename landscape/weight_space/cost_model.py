"""Estimate how long a surface takes on this machine from timings of its parts, and choose what fits a budget."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from landscape.options import format_duration, parse_duration
from landscape.products import operator, vectors
from landscape.subject import batchnorm, other_samples
from landscape.subject.device import wait_for
from landscape.subject.subject import Subject
from landscape.weight_space.forward_mode import REFERENCE, ExecutionMode, ForwardPass, fastest

GridSize = tuple[int, int]
MIN_POINTS, MIN_SAMPLES = 11, 64  # per axis, and in all; a surface of fewer is useless
LONG_SECONDS = 600.0  # from here on an estimate names options for a shorter run
SECONDS = 0.5  # of passes per timing: a single one may take twice as long where other programs run
CPU = torch.device("cpu")
PRODUCTS = 30  # for both ends of a Hessian's spectrum: 14 to 30 on the demo networks, at most 200


@dataclass(frozen=True)
class Workload:
    """What a run consists of."""

    points: Callable[[GridSize], int]  # number of evaluated points of a grid
    controls: Callable[[GridSize], int] = lambda grid: 0  # how many of them the reference mode evaluates too
    recalibrate: int = 0  # mini-batches that refresh batch norm at every point
    corners: int = 0  # evaluations in the reference mode before the first point
    eigen: bool = False  # whether the directions are eigenvectors, which are computed first
    data: float = 1.0  # samples of all data sets together, as a multiple of those of the subject


@dataclass(frozen=True)
class Rates:
    """Seconds of the parts of a run; 0 for parts that it lacks."""

    forward: float  # per sample and pass, in the execution mode of the run
    reference: float = 0.0  # per sample and pass, in the reference mode
    refresh: float = 0.0  # of batch norm's statistics, per point
    product: float = 0.0  # with the Hessian of all samples, per sample
    compilation: float = 0.0  # for a last mini-batch of another size, where the timed samples had none

    def before(self, work: Workload, samples: int) -> float:
        """Seconds before the first point: directions, and the checkpoints that span a plane."""
        corners = work.corners * (samples * self.reference + self.refresh)
        return corners + (PRODUCTS * samples * self.product if work.eigen else 0.0)

    def during(self, points: int, controls: int, samples: int, data: float = 1.0) -> float:
        """Seconds of the points, and of the checkpoint itself, with which all are compared."""
        return (points + 1) * (data * samples * self.forward + self.refresh) + controls * samples * self.reference

    def total(self, work: Workload, grid: GridSize, samples: int) -> float:
        points = self.during(work.points(grid), work.controls(grid), samples, work.data)
        return self.compilation + self.before(work, samples) + points


def rates(subject: Subject, mode: ExecutionMode, work: Workload) -> Rates:
    """Time each part of the work on a mini-batch of the full size."""
    compilation = _compile(subject, mode) if mode.compile else 0.0  # before anything is timed
    return Rates(
        reference=_forward(subject, REFERENCE) if mode != REFERENCE or work.corners else 0.0,
        forward=_forward(subject, mode),
        refresh=_refresh(subject, work.recalibrate) if work.recalibrate else 0.0,
        product=hessian_product_seconds(subject) if work.eigen else 0.0,
        compilation=compilation,
    )


def estimate(
    subject: Subject,
    mode: ExecutionMode,
    work: Workload,
    *,
    grid: GridSize,
    units: int,
    workers: int,
    at_most: bool,
    preview: int = 2**62,
) -> tuple[float, str]:
    """How long the pending units of a grid take after the directions are known, in seconds and in words.

    Each of several workers computes the eigenvectors itself. `at_most`: points may be left early. From ten minutes on
    the options for a shorter run are named; `preview`: points that a preview evaluates.
    """
    work, samples = replace(work, corners=0), len(subject)
    timed = rates(subject, mode, replace(work, eigen=work.eigen and workers > 1))

    def seconds(points: int) -> float:
        controls = work.controls(grid) * points / math.prod(grid)
        each = math.ceil(points / workers), math.ceil(controls / workers)
        return timed.before(work, samples) + timed.during(*each, samples, work.data)

    def words(points: int) -> str:
        return format_duration(seconds(points))

    points = min(units, work.points(grid))
    text = f"{'at most' if at_most else 'about'} {words(points)}"
    if points != units:
        text = f"{text}, or {words(units)} if interpolation errs and all are evaluated"
    if seconds(points) <= LONG_SECONDS:
        return seconds(points), text
    coarsest = timed.before(work, MIN_SAMPLES) + timed.during(MIN_POINTS**2, 0, MIN_SAMPLES, work.data)
    minutes = math.ceil(max(LONG_SECONDS, 2 * coarsest) / 60)
    fewer = f"--preview takes about {words(preview)} and " if preview < points else ""
    return seconds(points), f"{text}; {fewer}--budget {minutes}m lowers resolution and samples to fit"


def hessian_product_seconds(subject: Subject) -> float:
    """Seconds per sample of a product with the Hessian of all samples, whose graph is built anew each time."""
    curvature = operator.Curvature(replace(subject, weight_decay=0.0), subject.parameters, "double-backward")
    vector = vectors.random_unit(subject.size, 0, device=subject.device, dtype=subject.dtype)
    return _mean_seconds(lambda: curvature.product(0)(vector)[0].item()) / subject.samples(0)


def _forward(subject: Subject, mode: ExecutionMode) -> float:
    forward, samples = ForwardPass(subject, mode), subject.samples(0)
    with subject.evaluating():
        return _mean_seconds(lambda: forward.losses_and_right(0)[0].sum().item()) / samples


def _compile(subject: Subject, mode: ExecutionMode) -> float:
    """Compile for all sizes of mini-batches; if there is one only, the seconds that another will take."""
    forward, last = ForwardPass(subject, mode), len(subject.batches) - 1
    with subject.evaluating():
        start = time.perf_counter()
        forward(0)
        seconds = time.perf_counter() - start
        if subject.samples(last) == subject.samples(0):
            return seconds
        forward(last)
    return 0.0


def _refresh(subject: Subject, count: int) -> float:
    statistics = batchnorm.statistics(subject.model)
    with subject.evaluating():
        try:
            return _mean_seconds(lambda: batchnorm.refresh(subject, count), subject.device)
        finally:
            batchnorm.restore(subject.model, statistics)


def _mean_seconds(work: Callable[[], object], device: torch.device = CPU) -> float:
    """After a warm-up; of work on a GPU that does not wait for it, name the device."""

    def finished() -> None:
        work()
        wait_for(device)

    finished()
    start, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - start < SECONDS:
        finished()
        count += 1
    return (time.perf_counter() - start) / count


PLANNED = 0.9  # share of a budget: on a shared machine, rates change after half a second of timing
_log = logging.getLogger(__name__)


def autotune(
    subject: Subject, mode: ExecutionMode, *, grid: GridSize, work: Workload, tune: bool = False, budget: str = ""
) -> dict[str, Any]:
    """Choices by name, each of which could have been given as an option.

    The time that autotuning takes, compilation included, counts towards the budget. At most all samples of the subject
    and this grid are used; `tune` chooses batch size and memory format.

    Raises:
        ValueError: even the coarsest surface takes longer than the budget.
    """
    start = time.monotonic()
    choices: dict[str, Any] = {}
    if tune:
        size, mode = fastest(subject, mode)
        choices |= {"batch_size": size, "memory_format": mode.memory_format}
        subject = other_samples.rebatched(subject, size)
    if budget:
        timing = time.monotonic()
        timed = rates(subject, mode, work)
        now = time.monotonic()
        again = now - timing - timed.compilation  # the estimate that follows times the same
        left = PLANNED * parse_duration("budget", budget) - (now - start) - again
        grid, samples = fit_to_budget(grid, len(subject), work.points, partial(timed.total, work), left, budget)
        if subject.images is None and samples < len(subject):
            raise ValueError(f"--budget {budget} needs fewer samples than the {len(subject)} in memory; give fewer")
        choices |= {"resolution": ",".join(map(str, grid)), "samples": samples}
    _log.info("autotuned: %s", ", ".join(f"{name} {value}" for name, value in choices.items()))
    return choices


def fit_to_budget(
    grid: GridSize,
    samples: int,
    points: Callable[[GridSize], int],
    seconds: Callable[[GridSize, int], float],
    limit: float,
    budget: str,
) -> tuple[GridSize, int]:
    """Resolution and samples that fit the limit: both are lowered alike, odd resolutions stay odd.

    Starts from the finest grid and the most samples; `points` are evaluated on a grid, `budget` is as the user gave it.

    Raises:
        ValueError: nothing fits.
    """
    fewest, finest, most = min(MIN_SAMPLES, samples), grid, samples
    while seconds(grid, samples) > limit:
        coarser = tuple(n - 2 if n - 2 >= MIN_POINTS else n for n in grid)
        fewer_points = points((coarser[0], coarser[1])) < points(grid)  # not where a preview evaluates as many
        if samples > fewest and (not fewer_points or samples / most >= points(grid) / points(finest)):
            samples = max(fewest, int(0.9 * samples))
        elif coarser != grid:
            grid = (coarser[0], coarser[1])
        else:
            raise ValueError(
                f"--budget {budget} is too short: {grid[0]} x {grid[1]} points on {samples} samples take about "
                f"{math.ceil(seconds(grid, samples))} s; give more time, or --preview"
            )
    return grid, samples

"""Autotune a surface on this machine: batch size, memory format, and the resolution and samples that fit a budget."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from landscape.options import parse_duration
from landscape.subject.other_samples import rebatched
from landscape.subject.subject import Subject
from landscape.weight_space.cost_model import MIN_POINTS, MIN_SAMPLES, GridSize, Workload, rates
from landscape.weight_space.forward_mode import ExecutionMode, fastest

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
        subject = rebatched(subject, size)
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

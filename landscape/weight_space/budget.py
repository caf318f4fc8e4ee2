"""What a short trial on this machine chooses for a surface: batch size, memory format, resolution and samples."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from landscape.options import parse_duration
from landscape.subject.subject import Subject
from landscape.weight_space.cost_model import Grid, Work, rates
from landscape.weight_space.forward_mode import Manner, quickest

FEWEST_POINTS, FEWEST_SAMPLES = 11, 64  # per axis, and in all: below, a surface says nothing
PLANNED = 0.9  # of a budget: rates timed for half a second are not those of the next minutes on a shared machine
_log = logging.getLogger(__name__)


def chosen(
    subject: Subject,
    manner: Manner,
    *,
    grid: Grid,
    work: Work,
    tune: bool = False,
    budget: str = "",
) -> dict[str, Any]:
    """The choices by name, each of which could have been given as an option.

    What the trial itself takes is part of the budget, the compilation of a model within it.

    Args:
        subject: all samples that may be used.
        manner: of the forward passes.
        grid: the finest that may be used.
        work: what a run consists of.
        tune: choose batch size and memory format.
        budget: time that resolution and samples have to fit.

    Raises:
        ValueError: even the coarsest surface takes longer than the budget.
    """
    start = time.monotonic()
    found: dict[str, Any] = {}
    if tune:
        size, manner = quickest(subject, manner)
        found |= {"batch_size": size, "memory_format": manner.memory_format}
        subject = subject.rebatched(size)
    if budget:
        timing = time.monotonic()
        timed = rates(subject, manner, work)
        now = time.monotonic()
        again = now - timing - timed.compilation  # by the estimate that follows
        left = PLANNED * parse_duration("budget", budget) - (now - start) - again
        grid, samples = fitted(grid, len(subject), work.points, partial(timed.total, work), left, budget)
        if subject.images is None and samples < len(subject):
            raise ValueError(f"--budget {budget} needs fewer samples than the {len(subject)} in memory; give fewer")
        found |= {"resolution": ",".join(map(str, grid)), "samples": samples}
    _log.info("chosen by a trial: %s", ", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def fitted(
    grid: Grid,
    samples: int,
    points: Callable[[Grid], int],
    seconds: Callable[[Grid, int], float],
    limit: float,
    words: str,
) -> tuple[Grid, int]:
    """Resolution and samples whose cost is within the limit, both lowered alike, odd resolutions staying odd.

    Args:
        grid: the finest.
        samples: the most.
        points: how many of a grid's points are evaluated.
        seconds: what so many points and samples take in all.
        limit: seconds in all.
        words: how the limit was given.

    Raises:
        ValueError: it cannot be met.
    """
    fewest, finest, most = min(FEWEST_SAMPLES, samples), grid, samples
    while seconds(grid, samples) > limit:
        coarser = tuple(n - 2 if n - 2 >= FEWEST_POINTS else n for n in grid)
        helps = points((coarser[0], coarser[1])) < points(grid)  # not where a preview takes as many of either
        if samples > fewest and (not helps or samples / most >= points(grid) / points(finest)):
            samples = max(fewest, int(0.9 * samples))
        elif coarser != grid:
            grid = (coarser[0], coarser[1])
        else:
            raise ValueError(
                f"--budget {words} is too short: {grid[0]} x {grid[1]} points on {samples} samples take about "
                f"{math.ceil(seconds(grid, samples))} s; give more time, or --preview"
            )
    return grid, samples

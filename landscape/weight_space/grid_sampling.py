"""Which points of a surface are evaluated: all of its grid, or those that a preview chooses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from landscape.probe import Quantity, Stage
from landscape.weight_space import adaptive_sampling
from landscape.weight_space.cost_model import Grid

_log = logging.getLogger(__name__)
Data = Mapping[str, np.ndarray]


class ExactGrid:
    """Every point, at once."""

    quantities: ClassVar[Mapping[str, Quantity]] = {}  # in addition to those of every point

    def evaluations(self, grid: Grid) -> int:
        """Number of points that are evaluated, unless a preview turns out to need all."""
        return grid[0] * grid[1]

    def stage(self, data: Data, quantities: Iterable[str]) -> Stage | None:
        """The next stage from the stored arrays; see `landscape.probe.Stages`."""
        return None

    def summaries(self, data: Data) -> dict[str, float]:
        """Summaries of the sampling itself."""
        return {}


@dataclass(frozen=True)
class Preview(ExactGrid):
    """Points from coarse to fine, the others interpolated, the error measured at hold-outs."""

    quantities: ClassVar[Mapping[str, Quantity]] = {
        "evaluated": Quantity("1 where the loss was evaluated, 0 where it is interpolated")
    }
    tolerance: float  # relative error of the loss at the hold-outs beyond which every point is evaluated
    seed: int  # of the hold-outs

    def evaluations(self, grid: Grid) -> int:
        """The points of the design, or all of a small grid."""
        return min(grid[0] * grid[1], adaptive_sampling.DESIGN.total)

    def stage(self, data: Data, quantities: Iterable[str]) -> Stage | None:
        """The points to evaluate next; if there are none, all quantities of the others by interpolation."""
        step, evaluated = self._step(data), data["evaluated"] == 1
        if step.fallback and len(step.points):
            _log.info("preview: every point is evaluated, because %s", step.fallback)
        if len(step.points):
            return Stage([tuple(map(int, np.unravel_index(p, evaluated.shape))) for p in step.points], {})
        known = {name: data[name] for name in quantities if name not in ("evaluated", "deviates", "n")}
        unknown = {name: np.full(evaluated.shape, np.nan) for name in ("deviates", "n")}
        interpolated = adaptive_sampling.interpolate_missing((data["x"], data["y"]), known, evaluated)
        return Stage([], {**unknown, **interpolated, "evaluated": np.zeros(evaluated.shape)})

    def summaries(self, data: Data) -> dict[str, float]:
        """Error at the hold-outs and number of evaluations."""
        return {"hold_out_error": self._step(data).error, "evaluations": float((data["evaluated"] == 1).sum())}

    def _step(self, data: Data) -> adaptive_sampling.Step:
        axes, evaluated = (data["x"], data["y"]), data["evaluated"] == 1
        return adaptive_sampling.step(axes, data["loss"], evaluated, tolerance=self.tolerance, seed=self.seed)

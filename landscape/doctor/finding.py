"""What the doctor's rules read, a stored result and its grid, and what they return, findings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from scipy.special import ndtri

from landscape.results.protocols import side_by_side, stored
from landscape.results.run_key import OF_DATA, OF_NETWORK, OPTIONS, command_for

Severity: TypeAlias = Literal["wrong", "suspicious", "note"]
SEVERITIES: Sequence[Severity] = ("wrong", "suspicious", "note")  # the worst first
# Classes of data sets with a name, for results whose attributes do not say how many there are.
CLASSES: Mapping[str, int] = {"digits": 10, "cifar10": 10, "cifar100": 100}

MOST_SAMPLES = 50_000  # of a suggestion; beyond, all that there are
EXHAUSTED = "all samples are used already: these data cannot tell more"


@dataclass(frozen=True)
class Finding:
    """Something wrong, suspicious or worth knowing about stored numbers."""

    rule: str  # name of the rule, stable for scripts
    severity: Severity
    groups: tuple[str, ...]  # the results that it is about
    text: str  # what was found, with numbers
    remedy: str  # what to do: a command where one does it
    file: str = ""  # that holds the first of the results
    cause: str = ""  # what tells it from others of its rule, which otherwise are one finding


@dataclass(frozen=True)
class Result:
    """One stored result; arrays of unfinished units are masked to NaN by `values`."""

    file: Path
    group: str
    data: xr.Dataset

    @cached_property
    def probe(self) -> str:
        return self.group.partition("/")[0]

    @property
    def label(self) -> str:
        return str(self.data.attrs.get("label", ""))

    def attribute(self, name: str, default: Any = "") -> Any:
        return self.data.attrs.get(name, default)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the probe; empty where none are stored."""
        return stored(self.data, "parameters")

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The loading options; empty for an imported result."""
        return stored(self.data, "spec")

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What the network was built and trained with, as far as its checkpoint says."""
        return stored(self.data, "configuration")

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """What must agree with other results of the same probe that stand beside it, in words."""
        return side_by_side(self.data)

    @property
    def classes(self) -> int:
        """Number of classes, as the data, their name or the checkpoint says; 0 where it is unknown."""
        stored, named = int(self.attribute("classes", 0)), CLASSES.get(str(self.attribute("data")), 0)
        return stored or named or int(self.configuration.get("classes") or 0)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.attribute("samples", 0))

    @property
    def available(self) -> float:
        """Number of samples that the data have; infinite where nothing says it."""
        asked = str(self.spec.get("samples"))
        all_taken = asked == "all" or (asked.isdigit() and self.samples < int(asked))
        stated = int(self.attribute("samples_available", 0)) or math.inf
        return self.samples if all_taken else max(self.samples, stated)

    @property
    def exhausted(self) -> bool:
        """Whether these are all samples that the data have."""
        return self.samples >= self.available

    @cached_property
    def complete(self) -> bool:
        return "done" not in self.data or bool((self.data.variables["done"].values == 1).all())

    def values(self, name: str) -> np.ndarray:
        """A stored array as float64, NaN where its unit is not finished; empty (0,) where it is not stored."""
        known = self.data.variables
        if name not in known or known[name].dtype.kind not in "fiub":
            return np.array([])
        values = known[name].values.astype(float, copy=False)
        done = known.get("done")
        if not self.complete and done is not None and done.dims and known[name].dims[: done.ndim] == done.dims:
            finished = (done.values == 1).reshape(done.shape + (1,) * (values.ndim - done.ndim))
            values = np.where(finished, values, np.nan)
        return values

    @cached_property
    def grid(self) -> Grid | None:
        """The losses around its checkpoint, or between several, where it has such."""
        return Grid.of(self)

    def number(self, name: str) -> float:
        """A stored number without an axis; NaN where it is not stored."""
        values = self.values(name)
        return float(values) if values.shape == () else float("nan")

    def names(self, name: str) -> list[str]:
        return [str(value) for value in self.data.variables[name].values.ravel()] if name in self.data else []

    def command(self, **changes: Any) -> str:
        """The command that measures it again with some options changed; "" where none does."""
        return command_for(self.data.attrs, self.file, **changes)

    @property
    def evaluation(self) -> str:
        """The command that shows loss and accuracy of its checkpoint, with the preprocessing of its training."""
        asked = stored(self.data, OPTIONS)
        options = {name: asked[name] for name in (*OF_NETWORK, *OF_DATA) if name in asked}
        options["checkpoint"] = self.spec.get("checkpoint") or "CHECKPOINT"
        return command_for({"probe": "evaluate", OPTIONS: json.dumps(options)}, "")


Rule: TypeAlias = Callable[[Result], Iterator[Finding]]  # of one result
RuleOfSeveral: TypeAlias = Callable[[Sequence[Result]], Iterator[Finding]]  # of all results of one probe, or of all


def look_at_inputs(result: Result) -> str:
    """The remedy for numbers that are nowhere finite."""
    return f"check the inputs, and the weights: {result.evaluation}"


def measure_again(result: Result, otherwise: str, **changes: Any) -> str:
    """`run: COMMAND` with the changed options, or words for a result that no command measures."""
    command = result.command(**changes)
    return f"run: {command}" if command else otherwise


def more_samples(result: Result, factor: float) -> str:
    """The command with as many samples as make an error `factor` times smaller, at least twice as many."""
    if result.exhausted:
        return EXHAUSTED
    wanted = result.samples * max(2.0, factor * factor)  # may be infinite
    wanted = math.ceil(wanted / 100) * 100 if wanted < MOST_SAMPLES else math.inf
    asked = str(wanted) if wanted < result.available else "all"
    return measure_again(result, f"use {asked} samples", samples=asked)


def found(
    rule: str, severity: Severity, results: Result | Sequence[Result], text: str, remedy: str, cause: str = ""
) -> Finding:
    """A finding about one or several results."""
    results = [results] if isinstance(results, Result) else results
    return Finding(rule, severity, tuple(result.group for result in results), text, remedy, str(results[0].file), cause)


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
        return result.grid if kind in CENTRED else None

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
    values, grid = result.values(name), result.grid
    if grid is not None and grid.has_centre and values.ndim == 2:
        i, j = grid.centre
        return float(values[i, j] if result.probe == "surface" else values[0, i])
    return float(values[-1]) if result.probe == "trajectory" and values.size else math.nan

"""Measure the loss on a plane through the weights (Li et al. 2018, arXiv 1712.09913)."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape import options
from landscape.headline import Headline
from landscape.options import OptionError
from landscape.probe import Plan, Probe, Quantity, Stage, Unit, Values, make_texts
from landscape.statistics import basins, surface_summary
from landscape.subject import batchnorm, losses, other_samples, weights_cache
from landscape.subject.subject import Subject
from landscape.weight_space import cost_model, forward_mode, planes, weight_uses, weights_in_place
from landscape.weight_space.adaptive_sampling import DESIGN, Preview
from landscape.weight_space.cost_model import Workload
from landscape.weight_space.directions import IGNORE_HELP, NORMALIZE_HELP, POSITIONS, Normalize, Span, ticks
from landscape.weight_space.forward_mode import REFERENCE, ExecutionMode, MemoryFormat, Precision, is_control_point
from landscape.weight_space.plane_evaluator import L2Definition, PlaneEvaluator, path_labels, quantities
from landscape.weight_space.scores import ALSO_HELP, AXES, MARGIN_HELP, Scores, check, parts_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surface(Probe):
    """The loss at w0 + x d1 + y d2 over a grid, with its standard error over samples.

    Every grid point is a forward pass over the same samples in the same order, with the weights written in place.
    By default batch norm's running statistics are those of the checkpoint at every point; on a plane through three
    checkpoints they are interpolated like the weights, so that each checkpoint has its own loss. With weight
    decay, `objective` = loss + weight decay x l2 is stored too.

    With `--also`, or `--margin` alone, loss and accuracy on every data set are compared with those at the centre, and
    the radius at which each leaves its interval is stored (`statistics.basins`).
    """

    name: ClassVar[str] = "surface"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"plane": ("random", "eigen")}
    staged_by: ClassVar[str] = "--preview"
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": "3"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {
            "resolution": "21", "normalize": "park2022", "l2_definition": "park2022",
            "split": "train", "augment": True, "weight_decay": 0.05,
        }
    }  # fmt: skip
    headlines: ClassVar[Sequence[Headline]] = surface_summary.HEADLINES

    resolution: Annotated[str, "grid points per axis: N or NX,NY; odd numbers include the centre"] = "51"
    range: Annotated[
        str, "R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH; default 1, or set by the curvature, the run or the checkpoints"
    ] = ""
    normalize: Annotated[Normalize, NORMALIZE_HELP] = "filter"
    plane: Annotated[
        str, "random, eigen, A.pt,B.pt (through three checkpoints), RUN_DIR (its principal plane) or DIRECTIONS.h5"
    ] = "random"
    ignore: Annotated[str, IGNORE_HELP] = POSITIONS
    bn: Annotated[
        str, "batch norm: frozen, interpolate, recalibrate:K (on K mini-batches); auto interpolates between checkpoints"
    ] = "auto"
    directions: Annotated[int, "pairs of random directions, a seed each"] = 1
    l2_definition: Annotated[L2Definition, "l2 as (1/2) sum ||w||^2, or as the sum of the tensors' norms"] = "squared"
    preview: Annotated[bool, "evaluate about 340 points, interpolate the others, and measure the error"] = False
    tolerance: Annotated[float, "relative error of a preview beyond which every point is evaluated"] = 0.05
    cap: Annotated[float | None, "stop evaluating points whose loss is clearly above this; their value is rough"] = None
    precision: Annotated[
        Precision, "bf16 (autocast) and tf32 (GPUs) are faster; the deviation is measured in standard errors"
    ] = "fp32"
    memory_format: Annotated[MemoryFormat, "channels_last is often faster for convolutions"] = "contiguous"
    compile: Annotated[bool, "use torch.compile, which takes up to a minute first"] = False
    tune: Annotated[bool, "benchmark and pick batch size and memory format; the choice is stored"] = False
    budget: Annotated[str, "time after loading, such as 90s, 30m or 2h; lowers resolution and samples to fit"] = ""
    also: Annotated[tuple[str, ...], ALSO_HELP] = ()
    margin: Annotated[str, MARGIN_HELP] = ""
    seed: Annotated[int, "seed of the random directions"] = 0

    def __post_init__(self) -> None:
        for count in options.parse_resolution("resolution", str(self.resolution)):
            options.at_least("resolution", count, 2)
        options.at_least("directions", self.directions, 1)
        if self.directions > 1 and self.plane != "random":
            raise OptionError(
                f"--directions {self.directions} applies to random planes only; drop it for --plane {self.plane}"
            )
        options.one_of("normalize", self.normalize, get_args(Normalize))
        options.one_of("l2_definition", self.l2_definition, get_args(L2Definition))
        options.one_of("precision", self.precision, get_args(Precision))
        options.one_of("memory_format", self.memory_format, get_args(MemoryFormat))
        options.regular_expression("ignore", self.ignore)
        options.require(
            0 < self.tolerance < math.inf, "tolerance", f"{self.tolerance:g}", "a share above 0, such as 0.05"
        )
        if self.cap is not None:
            options.require(math.isfinite(self.cap), "cap", f"{self.cap:g}", "a finite loss")
        if self.budget:
            options.parse_duration("budget", self.budget)
        if self.range:
            options.parse_ranges("range", str(self.range))
        if self.bn == "auto" and not self._through_checkpoints:
            object.__setattr__(self, "bn", "frozen")
        weights_in_place.RunningStatistics.parse(self.bn)
        if self.bn == "interpolate" and not self._through_checkpoints:
            raise OptionError(f"--bn interpolate needs a plane through checkpoints; drop it for --plane {self.plane}")
        if self.preview and (self.also or self.margin):
            raise OptionError("--preview interpolates the loss alone; drop it for --also and --margin")
        check(self.also, str(self.margin))
        make_texts(self, "resolution", "range", "margin")

    def variants(self) -> "list[Surface]":
        """One surface per pair of directions; they share the budget."""
        budget = self.budget
        if budget and self.directions > 1:
            budget = f"{options.parse_duration('budget', budget) / self.directions:g}s"
        return [replace(self, seed=self.seed + k, directions=1, budget=budget) for k in range(self.directions)]

    def autotune(self, subject: Subject) -> dict[str, Any]:
        """The choices that `tune` and `budget` ask for, once for all pairs of directions: their grids are the same."""
        if not (self.tune or self.budget):
            return {}
        return _choices(subject, replace(self, seed=0))

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> "tuple[Surface, Subject]":
        own = {name: choices[name] for name in ("resolution", "memory_format") if name in choices}
        subject = other_samples.on_first(subject, choices.get("samples", len(subject)))
        subject = other_samples.rebatched(subject, choices.get("batch_size", subject.batch_size))
        return replace(self, tune=False, budget="", **own), subject

    def estimate(self, subject: Subject, units: int, workers: int = 1) -> tuple[float, str]:
        """How long so many units take after the directions are known, in seconds and in words."""
        sizes: dict[str, Any] = {"grid": self._grid, "units": units, "workers": workers}
        sizes["preview"] = DESIGN.total
        return cost_model.estimate(subject, self.mode, self._work(subject), **sizes, at_most=self.cap is not None)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters in the run key: contents instead of paths, numbers instead of their spelling."""
        known: dict[str, Any]
        if self.plane == "eigen":  # without the eigenvectors: a budget may want those of fewer samples
            spans = options.parse_ranges("range", self.range) if self.range else "by curvature"
            known = {"range": spans, "plane": "eigen", "bn": self.bn}
        else:
            plane = self._plane(subject)
            statistics = self._statistics(plane)
            bn = "interpolate" if statistics.interpolate else self.bn if statistics.recalibrate else "frozen"
            known = {"range": self._ranges(plane), "plane": plane.identity, "bn": bn}
        scores = self._scores(subject)
        return {
            **({} if self.preview else {"tolerance": None}), **(scores.identity() if scores else {}),
            **batchnorm.dependence(subject, self._recalibrate),
            **({"weight_decay": subject.weight_decay} if subject.weight_decay else {}),
            **({} if self.cap is None else {"batch_size": subject.batch_size}), "resolution": self._grid, **known,
        }  # fmt: skip

    def plan(self, subject: Subject) -> Plan:
        plane = self._plane(subject)
        statistics = self._statistics(plane)
        (x_low, x_high), (y_low, y_high) = self._ranges(plane)
        nx, ny = self._grid
        if plane.kind == "eigen" and not self.range:
            _log.info("surface: --range %g:%g,%g:%g from the curvature along each axis", x_low, x_high, y_low, y_high)
        centred = plane.kind == "checkpoints" or (plane.kind == "run" and not self.range)
        if (nx % 2 == 0 or ny % 2 == 0) and not centred:
            _log.warning("note: --resolution %s has no point at the centre; odd numbers have one", self.resolution)
        derivatives = Quantity("second derivative", dims=("term",)), np.array(["xx", "xy", "yy"])
        path, reference = path_labels(subject, plane, statistics), self.mode == REFERENCE
        scores, over = self._scores(subject), {"x": ticks(x_low, x_high, nx), "y": ticks(y_low, y_high, ny)}
        return Plan(
            over=over,
            axes={
                "radius": np.array(surface_summary.RADII),
                "term": np.arange(3),
                "minimum": np.arange(surface_summary.MINIMA),
                "part": np.arange(parts_of(subject)),
                **({"snapshot": np.arange(plane.path.shape[1])} if path else {}),
                **({**scores.axes(), "distance": basins.distances(over["x"], over["y"])} if scores else {}),
            },
            labels={
                **{"derivative": derivatives, **path, **_weight_decay(subject)},
                **(scores.labels() if scores else {}),
            },
            quantities=self._quantities(subject.meaning),
            summaries={
                **surface_summary.quantities(
                    preview=self.preview,
                    reference=reference,
                    decayed=subject.weight_decay > 0,
                    units=subject.meaning.units,
                ),
                **(basins.summaries(plane.units, plane=True) if scores else {}),
            },
            about={
                **{axis: Quantity(name, plane.units) for axis, name in zip("xy", plane.names, strict=True)},
                "radius": Quantity("distance from the centre", plane.units),
                "term": Quantity("second derivative"),
                "minimum": Quantity("local minimum, the most persistent first"),
                "part": Quantity("part of the samples"),
                "snapshot": Quantity("snapshot of the run"),
                **({**AXES, "distance": Quantity("distance from the centre", plane.units)} if scores else {}),
            },
            facts={
                "l2_definition": self.l2_definition,
                **plane.facts,
                "statistics": str(statistics),
                "not_moved": weight_uses.not_moved(subject, plane.directions),
            },
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points that share the directions, transferred row by row."""
        plane, names, shape = self._plane(subject), self._quantities(), self._grid
        controls = self.mode != REFERENCE
        points = ((float(u.at["x"]), float(u.at["y"]), controls and is_control_point(u.index, shape)) for u in units)
        with PlaneEvaluator(
            subject,
            plane,
            self._statistics(plane),
            l2_definition=self.l2_definition,
            mode=self.mode,
            cap=self.cap,
            scores=self._scores(subject),
        ) as evaluator:
            for values in evaluator.evaluate(points):
                yield {name: {**values, "evaluated": 1.0}[name] for name in names}

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage | None:
        """What a preview evaluates next, or all that it interpolates; without preview every point, at once."""
        return self._preview.stage(data, self._quantities()) if self._preview else None

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Summaries of the finished points; those of the whole grid once it is finished."""
        found = {**surface_summary.summarise(data), **(self._preview.summaries(data) if self._preview else {})}
        return {**found, **basins.of_plane(data)} if "score_worse" in data else found

    @property
    def mode(self) -> ExecutionMode:
        return ExecutionMode(self.precision, self.memory_format, self.compile)

    @property
    def _preview(self) -> Preview | None:
        return Preview(self.tolerance, self.seed) if self.preview else None

    @property
    def _grid(self) -> tuple[int, int]:
        return options.parse_resolution("resolution", self.resolution)

    @property
    def _through_checkpoints(self) -> bool:
        return "," in self.plane

    @property
    def _recalibrate(self) -> int:
        return weights_in_place.RunningStatistics.parse(self.bn).recalibrate

    @property
    def _workload(self) -> Workload:
        # The checkpoint and three corners, with their own statistics and by `bn`.
        corners = (4 if self.bn in batchnorm.INTERPOLATING else 8) if self._through_checkpoints else 0
        return Workload(
            points=lambda grid: min(math.prod(grid), DESIGN.total) if self.preview else math.prod(grid),
            controls=forward_mode.control_points if self.mode != REFERENCE else lambda grid: 0,
            recalibrate=self._recalibrate, corners=corners, eigen=self.plane == "eigen",
        )  # fmt: skip

    def _work(self, subject: Subject) -> Workload:
        """With the further data sets."""
        scores = self._scores(subject)
        return replace(self._workload, data=sum(map(len, scores.subjects)) / len(subject)) if scores else self._workload

    def _scores(self, subject: Subject) -> Scores | None:
        return Scores.of(subject, self.also, self.margin, recalibrate=self._recalibrate, mode=self.mode)

    def _plane(self, subject: Subject) -> planes.Plane:
        drawn: dict[str, Any] = {name: getattr(self, name) for name in ("normalize", "ignore", "seed")}
        return _plane(subject, self.plane, **drawn)

    def _ranges(self, plane: planes.Plane) -> tuple[Span, Span]:
        return options.parse_ranges("range", self.range) if self.range else plane.default_ranges(self._grid)

    def _statistics(self, plane: planes.Plane) -> weights_in_place.RunningStatistics:
        return weights_in_place.RunningStatistics.parse(self.bn, interpolate=any(plane.ends))

    def _quantities(self, meaning: losses.Meaning = losses.CLASSIFICATION) -> dict[str, Quantity]:
        evaluated = {"evaluated": Quantity("1 where the loss was evaluated, 0 where it is interpolated")}
        scores = bool(self.also or self.margin)
        every = quantities(meaning, self.l2_definition, self.mode, self.cap, scores=scores)
        return every | evaluated if self.preview else every


_plane = weights_cache.once_per_weights(planes.plane_of)


def _weight_decay(subject: Subject) -> dict[str, tuple[Quantity, np.ndarray]]:
    """The coefficient of l2 in `objective`, where there is one."""
    decay = subject.weight_decay
    return {"weight_decay": (Quantity("coefficient of l2 in the objective"), np.array(decay))} if decay else {}


@weights_cache.once_per_weights
def _choices(subject: Subject, surface: Surface) -> dict[str, Any]:
    work, tune, budget = surface._work(subject), surface.tune, surface.budget
    return cost_model.autotune(subject, surface.mode, grid=surface._grid, work=work, tune=tune, budget=budget)

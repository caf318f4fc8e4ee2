"""Loss on a plane through the weights (Li et al. 2018, arXiv 1712.09913)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape.options import (
    OptionError,
    at_least,
    format_duration,
    one_of,
    parse_duration,
    parse_ranges,
    parse_resolution,
    regular_expression,
    require,
)
from landscape.probe import Plan, Probe, Quantity, Stage, Unit, Values
from landscape.results import surface_summary as summaries
from landscape.subject import batchnorm
from landscape.subject.batchnorm import recalibration
from landscape.subject.checks import refuse_unsteady
from landscape.subject.derived import once_per_weights
from landscape.subject.losses import CLASSIFICATION, Meaning
from landscape.subject.subject import Subject
from landscape.weight_space import adaptive_sampling
from landscape.weight_space import budget as budgets
from landscape.weight_space.coordinates import Span, through_centre, through_checkpoints, ticks
from landscape.weight_space.cost_model import Work, rates
from landscape.weight_space.directions import POSITIONS, Normalize
from landscape.weight_space.forward_mode import Manner, MemoryFormat, Precision
from landscape.weight_space.plane_evaluator import Evaluator, L2Definition
from landscape.weight_space.planes import Plane, plane_of

LATER = ("orthogonal", "preview", "tolerance", "cap", "precision", "memory_format", "compile", "tune", "budget")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surface(Probe):
    """The loss at w0 + x d1 + y d2 over a grid, with its standard error over samples.

    Every grid point is one forward pass over the same samples in the same order, with the weights written in place.
    The checkpoint's own batch-norm statistics are used at every point unless `bn` says otherwise; on a plane
    through three checkpoints they are interpolated like the weights by default, so that every corner has its own loss.
    """

    name: ClassVar[str] = "surface"
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": "3"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {
            "resolution": "21", "normalize": "park2022", "l2_definition": "park2022",
            "split": "train", "augment": True, "weight_decay": 0.05,
        }
    }  # fmt: skip

    resolution: Annotated[str, "grid points per axis: N or NX,NY; odd numbers include the centre"] = "51"
    range: Annotated[
        str, "R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH; default 1, or what curvature, a run or checkpoints need"
    ] = ""
    normalize: Annotated[Normalize, "length of random directions: per filter, per layer, none, or as published"] = (
        "filter"
    )
    plane: Annotated[
        str, "random, eigen, A.pt,B.pt (through three checkpoints), RUN_DIR (its principal plane) or DIRECTIONS.h5"
    ] = "random"
    ignore: Annotated[str, "regular expression: parameters that do not move"] = POSITIONS
    bn: Annotated[
        str,
        "batch-norm statistics: frozen, interpolate, recalibrate:K mini-batches; auto interpolates between checkpoints",
    ] = "auto"
    directions: Annotated[int, "repeat with that many pairs of random directions, seeds counted up"] = 1
    l2_definition: Annotated[
        L2Definition, "l2 as (1/2) sum ||w||^2, or as the sum of unsquared norms of the tensors"
    ] = "squared"
    orthogonal: Annotated[bool, "make the second random direction orthogonal to the first, after normalisation"] = False
    preview: Annotated[bool, "evaluate some 340 points, interpolate the others, and measure by how much that errs"] = (
        False
    )
    tolerance: Annotated[float, "relative error of a preview beyond which every point is evaluated"] = 0.05
    cap: Annotated[float | None, "leave points early whose loss is clearly above it; their value is a rough one"] = None
    precision: Annotated[Precision, "bf16 is faster; its deviation is measured in standard errors"] = "fp32"
    memory_format: Annotated[MemoryFormat, "channels_last is often faster for convolutions"] = "contiguous"
    compile: Annotated[bool, "compile the model first, which takes up to a minute"] = False
    tune: Annotated[bool, "choose batch size and memory format by a short trial, recorded with the answer"] = False
    budget: Annotated[str, "time after loading such as 90s, 30m or 2h: lower resolution and samples until they fit"] = (
        ""
    )
    seed: Annotated[int, "seed of the random directions"] = 0

    def __post_init__(self) -> None:
        for count in parse_resolution("resolution", str(self.resolution)):
            at_least("resolution", count, 2)
        at_least("directions", self.directions, 1)
        if self.plane != "random":
            for asked, words in (
                (self.directions > 1, f"directions {self.directions}"),
                (self.orthogonal, "orthogonal"),
            ):
                if asked:
                    raise OptionError(f"--{words} is about random planes; drop it beside --plane {self.plane}")
        one_of("normalize", self.normalize, get_args(Normalize))
        one_of("l2_definition", self.l2_definition, get_args(L2Definition))
        one_of("precision", self.precision, get_args(Precision))
        one_of("memory_format", self.memory_format, get_args(MemoryFormat))
        regular_expression("ignore", self.ignore)
        require(self.tolerance > 0, "tolerance", f"{self.tolerance:g}", "a share above 0, such as 0.05")
        if self.cap is not None:
            require(math.isfinite(self.cap), "cap", f"{self.cap:g}", "a finite loss")
        if self.budget:
            parse_duration("budget", self.budget)
        if self.range:
            parse_ranges("range", str(self.range))
        if self.bn == "auto" and "," not in self.plane:  # one checkpoint: nothing to interpolate between
            object.__setattr__(self, "bn", "frozen")
        if self.bn not in batchnorm.INTERPOLATING:
            recalibration(self.bn)
        if self.bn == "interpolate" and "," not in self.plane:
            raise OptionError(
                f"--bn interpolate needs a plane through checkpoints; drop it beside --plane {self.plane}"
            )
        for name in ("resolution", "range"):  # numbers are welcome from Python
            object.__setattr__(self, name, str(getattr(self, name)))

    @property
    def manner(self) -> Manner:
        """How the forward passes are computed."""
        return Manner(self.precision, self.memory_format, self.compile)

    def variants(self) -> list[Surface]:
        """One surface per pair of directions, which share the budget."""
        budget = self.budget
        if budget and self.directions > 1:
            budget = f"{parse_duration('budget', budget) / self.directions:g}s"
        return [replace(self, seed=self.seed + k, directions=1, budget=budget) for k in range(self.directions)]

    def autotune(self, subject: Subject) -> dict[str, Any]:
        """What `tune` and `budget` leave to a trial, chosen on this machine; empty where nothing is.

        Once for all pairs of directions, so that their grids are one.
        """
        if not (self.tune or self.budget):
            return {}
        return _choices(subject, replace(self, seed=0))

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> tuple[Surface, Subject]:
        """The question, and the subject, with the choices of a trial: those that could have been given outright."""
        own = {name: choices[name] for name in ("resolution", "memory_format") if name in choices}
        subject = subject.first(choices.get("samples", len(subject)))
        return replace(self, tune=False, budget="", **own), subject.rebatched(
            choices.get("batch_size", subject.batch_size)
        )

    def estimate(self, subject: Subject, units: int, workers: int = 1) -> str:
        """How long so many units take, the directions made before, in words."""
        work, samples = replace(self._work(subject), corners=0), len(subject)
        found = rates(subject, self.manner, replace(work, eigen=work.eigen and workers > 1))  # each seeks its own

        def taken(points: int) -> str:
            controls = work.controls(self._grid) * points / math.prod(self._grid)
            each = math.ceil(points / workers), math.ceil(controls / workers)
            return format_duration(found.before(work, samples) + found.during(*each, samples))

        points = min(units, work.points(self._grid))
        said = f"{'at most' if self.cap is not None else 'about'} {taken(points)}"
        return said if points == units else f"{said}, or {taken(units)} if interpolation errs and all are evaluated"

    def _work(self, subject: Subject) -> Work:
        corners = 0
        if "," in self.plane:  # the origin and three corners, of the checkpoints themselves and as treated
            corners = 4 if self.bn in batchnorm.INTERPOLATING else 8
        fast = self.manner != Manner()
        return Work(
            points=self._evaluations,
            controls=lambda grid: math.prod(len(_controlled(n)) for n in grid) if fast else 0,
            recalibrate=self._recalibrate,
            corners=corners,
            eigen=self.plane == "eigen",
        )

    @property
    def _grid(self) -> tuple[int, int]:
        return parse_resolution("resolution", self.resolution)

    def _evaluations(self, grid: tuple[int, int]) -> int:
        return min(grid[0] * grid[1], adaptive_sampling.DESIGN.total) if self.preview else grid[0] * grid[1]

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters as they enter the question: contents instead of paths, numbers instead of their spelling.

        Parameters that came later enter where they are not at their defaults, so that older answers stay found.
        """
        known: dict[str, Any]
        if self.plane == "eigen":  # without looking for the eigenvectors, which a budget may want of fewer samples
            spans = parse_ranges("range", self.range) if self.range else "by curvature"
            known = {"range": spans, "plane": "eigen", "bn": self.bn}
        else:
            plane = self._plane(subject)
            bn = "interpolate" if self._interpolates(plane) else "frozen" if self._recalibrate == 0 else self.bn
            known = {"range": self._range(plane), "plane": plane.identity, "bn": bn}
        plain = Surface()
        later = {name: getattr(self, name) for name in LATER if getattr(self, name) != getattr(plain, name)}
        if not self.preview:
            later.pop("tolerance", None)
        asked = {name: value for name, value in asdict(self).items() if name not in LATER}
        return {
            **asked,
            **later,
            **batchnorm.dependence(subject, self._recalibrate),
            **({} if self.cap is None else {"batch_size": subject.batch_size}),
            "resolution": self._grid,
            **known,
        }

    def plan(self, subject: Subject) -> Plan:
        refuse_unsteady(subject)
        plane = self._plane(subject)
        (x_low, x_high), (y_low, y_high) = self._range(plane)
        nx, ny = self._grid
        if plane.kind == "eigen" and not self.range:
            _log.info("surface: --range %g:%g,%g:%g by the curvature of either axis", x_low, x_high, y_low, y_high)
        through = plane.kind == "checkpoints" or (plane.kind == "run" and not self.range)
        if (nx % 2 == 0 or ny % 2 == 0) and not through:
            _log.warning("note: --resolution %s has no point at the centre; odd numbers have one", self.resolution)
        path = np.arange(plane.path.shape[1])
        where = {
            "path_x": (
                Quantity("first coordinate of the snapshot", plane.units, ("snapshot",)),
                plane.path[0],
            ),
            "path_y": (
                Quantity("second coordinate of the snapshot", plane.units, ("snapshot",)),
                plane.path[1],
            ),
            "path_name": (Quantity("snapshot", dims=("snapshot",)), np.array(plane.path_names)),
            **(self._corners(subject, plane) if plane.kind == "checkpoints" else {}),
        }
        return Plan(
            over={"x": ticks(x_low, x_high, nx), "y": ticks(y_low, y_high, ny)},
            axes={"radius": np.array(summaries.RADII), "term": np.arange(3), "minimum": np.arange(summaries.MINIMA),
                  **({"snapshot": path} if len(path) else {})},
            labels={"derivative": (Quantity("second derivative", dims=("term",)), np.array(["xx", "xy", "yy"])),
                    **(where if len(path) else {})},
            quantities=self._quantities(subject.meaning),
            summaries=summaries.quantities(
                preview=self.preview, plain=self.manner == Manner(), units=subject.meaning.units
            ),
            about={
                "x": Quantity(plane.names[0], plane.units),
                "y": Quantity(plane.names[1], plane.units),
                "radius": Quantity("distance from the centre", plane.units),
                "term": Quantity("second derivative"),
                "minimum": Quantity("local minimum, the most persistent first"),
                "snapshot": Quantity("snapshot of the run"),
            },
            facts={"l2_definition": self.l2_definition, "plane": plane.kind, "cosine": plane.cosine,
                   "norm_x": plane.norms[0], "norm_y": plane.norms[1], **plane.model,
                   "statistics": self._statistics(plane)},
        )  # fmt: skip

    def _quantities(self, meaning: Meaning = CLASSIFICATION) -> dict[str, Quantity]:
        squared = self.l2_definition == "squared"
        found = {
            "loss": Quantity("loss", meaning.units),
            "loss_se": Quantity("standard error of the loss over samples", meaning.units),
            "rise_se": Quantity(
                "standard error of the loss minus the checkpoint's, paired over samples", meaning.units
            ),
            "l2": Quantity("half the squared norm of the weights" if squared else "sum of the norms of the tensors"),
            "accuracy": meaning.of_accuracy("accuracy"),
        }
        if self.preview:
            found["evaluated"] = Quantity("1 where the loss was evaluated, 0 where it is interpolated")
        if self.cap is not None:
            found["n"] = Quantity("samples behind the loss")
        if self.manner != Manner():
            found["deviates"] = Quantity("deviation from the plain forward pass at control points", "standard errors")
        return found

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points with shared directions, transferred row by row."""
        plane, wanted, shape = self._plane(subject), self._quantities(), self._grid
        controls = self.manner != Manner()
        places = ((float(u.at["x"]), float(u.at["y"]), controls and control(u.index, shape)) for u in units)
        with Evaluator(
            subject, plane, self._recalibrate, self.l2_definition, manner=self.manner, cap=self.cap,
            interpolate=self._interpolates(plane),
        ) as evaluator:  # fmt: skip
            for found in evaluator.along(places):
                yield {name: {**found, "evaluated": 1.0}[name] for name in wanted}

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage | None:
        """What a preview evaluates next, or all that it interpolates; without preview every point, at once."""
        if not self.preview:
            return None
        axes, evaluated = (data["x"], data["y"]), data["evaluated"] == 1
        step = adaptive_sampling.step(axes, data["loss"], evaluated, tolerance=self.tolerance, seed=self.seed)
        if step.fallback and len(step.points):
            _log.info("preview: every point is evaluated, because %s", step.fallback)
        if len(step.points):
            return Stage([tuple(map(int, np.unravel_index(p, evaluated.shape))) for p in step.points], {})
        kept = {name: data[name] for name in self._quantities() if name not in ("evaluated", "deviates", "n")}
        unknown = {name: np.full(evaluated.shape, np.nan) for name in ("deviates", "n")}
        return Stage(
            [], {**unknown, **adaptive_sampling.filled(axes, kept, evaluated), "evaluated": np.zeros(evaluated.shape)}
        )

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Summaries of what is finished; those of the whole grid when all of it is."""
        found = summaries.of(data)
        if self.preview:
            axes, evaluated = (data["x"], data["y"]), data["evaluated"] == 1
            step = adaptive_sampling.step(axes, data["loss"], evaluated, tolerance=self.tolerance, seed=self.seed)
            found["hold_out_error"], found["evaluations"] = step.error, float(evaluated.sum())
        return found

    def _plane(self, subject: Subject) -> Plane:
        return _plane(
            subject, self.plane, normalize=self.normalize, ignore=self.ignore, seed=self.seed,
            orthogonal=self.orthogonal,
        )  # fmt: skip

    def _range(self, plane: Plane) -> tuple[Span, Span]:
        if self.range:
            return parse_ranges("range", self.range)
        nx, ny = self._grid
        if plane.kind == "checkpoints":
            return through_checkpoints(nx), through_checkpoints(ny)
        if plane.kind == "run":
            return through_centre(plane.spans[0], nx), through_centre(plane.spans[1], ny)
        return plane.spans

    @property
    def _recalibrate(self) -> int:
        return 0 if self.bn in batchnorm.INTERPOLATING else recalibration(self.bn)

    def _interpolates(self, plane: Plane) -> bool:
        return self.bn in batchnorm.INTERPOLATING and any(plane.ends)

    def _statistics(self, plane: Plane) -> str:
        if self._interpolates(plane):
            return "interpolated between the checkpoints"
        return f"refreshed on {self._recalibrate} mini-batches at every point" if self._recalibrate else "frozen"

    def _corners(self, subject: Subject, plane: Plane) -> dict[str, tuple[Quantity, np.ndarray]]:
        """The checkpoints' own losses, and by how much the plane's differ from them."""
        own = _corner_losses(subject, plane, 0, True)
        here = _corner_losses(subject, plane, self._recalibrate, self._interpolates(plane))
        said = ", ".join(
            f"{name or subject.label} {there:.4g} (its own {itself:.4g})"
            for name, there, itself in zip(plane.path_names, here, own, strict=True)
        )
        treated = f"batch-norm statistics {self._statistics(plane)}; " if any(plane.ends) else ""
        _log.info("surface: %sloss at the checkpoints: %s", treated, said)
        per_snapshot, units = ("snapshot",), subject.meaning.units
        return {
            "path_loss": (Quantity("loss of the checkpoint itself", units, per_snapshot), own),
            "path_excess": (Quantity("loss on the plane minus the checkpoint's own", units, per_snapshot), here - own),
        }


_plane = once_per_weights(plane_of)


@once_per_weights
def _choices(subject: Subject, surface: Surface) -> dict[str, Any]:
    return budgets.chosen(
        subject, surface.manner, grid=surface._grid, work=surface._work(subject), tune=surface.tune,
        budget=surface.budget,
    )  # fmt: skip


@once_per_weights
def _corner_losses(subject: Subject, plane: Plane, recalibrate: int, interpolate: bool) -> np.ndarray:
    with Evaluator(subject, plane, recalibrate, interpolate=interpolate) as evaluator:
        return np.array([evaluator.at(x, y)["loss"] for x, y in plane.path.T.tolist()])


def control(index: tuple[int, ...], shape: tuple[int, int]) -> bool:
    """Whether a unit is one of the 5 x 5 even points at which a fast manner is compared with the plain one."""
    return all(i in _controlled(n) for i, n in zip(index, shape, strict=True))


def _controlled(count: int) -> set[int]:
    return set(np.linspace(0, count - 1, 5).round().astype(int).tolist())

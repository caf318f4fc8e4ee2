"""Loss on a plane through the weights (Li et al. 2018, arXiv 1712.09913)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape import batchnorm
from landscape.linalg.directions import POSITIONS, Normalize
from landscape.plane import Evaluator, L2Definition, Plane, plane_of
from landscape.probe import OptionError, Plan, Quantity, Unit, Values, at_least, one_of, regular_expression
from landscape.subject import Subject

RADII = (0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Surface:
    """The loss at w0 + x d1 + y d2 over a grid, with its standard error over samples.

    Every grid point is one forward pass over the same samples in the same order, with the weights written in place.
    The checkpoint's own batch-norm statistics are used at every point unless `bn` says recalibrate.
    """

    name: ClassVar[str] = "surface"
    uses: ClassVar[tuple[str, ...]] = ()
    split: ClassVar[str] = "train"
    batch_size: ClassVar[int] = 128
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {
            "resolution": "21", "normalize": "park2022", "l2_definition": "park2022",
            "split": "train", "augment": True, "weight_decay": 0.05,
        }
    }  # fmt: skip

    resolution: Annotated[str, "grid points per axis: N or NX,NY; odd numbers include the centre"] = "51"
    range: Annotated[str, "R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH; default 1, or what a run or checkpoints need"] = ""
    normalize: Annotated[Normalize, "length of random directions: per filter, per layer, none, or as published"] = (
        "filter"
    )
    plane: Annotated[
        str, "random, eigen, A.pt,B.pt (through three checkpoints), RUN_DIR (its principal plane) or DIRECTIONS.h5"
    ] = "random"
    ignore: Annotated[str, "regular expression: parameters that do not move"] = POSITIONS
    bn: Annotated[str, "batch-norm statistics: frozen, or recalibrate:K on K mini-batches at every point"] = "frozen"
    directions: Annotated[int, "repeat with that many pairs of random directions, seeds counted up"] = 1
    l2_definition: Annotated[
        L2Definition, "l2 as (1/2) sum ||w||^2, or as the sum of unsquared norms of the tensors"
    ] = "squared"
    seed: Annotated[int, "seed of the random directions"] = 0

    def __post_init__(self) -> None:
        for count in pair(str(self.resolution), int, "resolution"):
            at_least("resolution", count, 2)
        at_least("directions", self.directions, 1)
        if self.directions > 1 and self.plane != "random":
            raise OptionError(
                f"--directions {self.directions} repeats random planes; drop it beside --plane {self.plane}"
            )
        one_of("normalize", self.normalize, get_args(Normalize))
        one_of("l2_definition", self.l2_definition, get_args(L2Definition))
        regular_expression("ignore", self.ignore)
        if self.range:
            spans(str(self.range))
        recalibration(self.bn)
        for name in ("resolution", "range"):  # numbers are welcome from Python
            object.__setattr__(self, name, str(getattr(self, name)))

    def variants(self) -> list[Surface]:
        """One surface per pair of directions."""
        return [replace(self, seed=self.seed + k, directions=1) for k in range(self.directions)]

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters as they enter the question: contents instead of paths, numbers instead of their spelling."""
        plane = self._plane(subject)
        asked = {
            **asdict(self),
            **batchnorm.dependence(subject, recalibration(self.bn)),
            "resolution": pair(self.resolution, int, "resolution"),
            "range": self._range(plane),
        }
        return {**asked, "plane": plane.identity, "l2_definition": self.l2_definition}

    def plan(self, subject: Subject) -> Plan:
        plane = self._plane(subject)
        (x_low, x_high), (y_low, y_high) = self._range(plane)
        nx, ny = pair(self.resolution, int, "resolution")
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
        }
        return Plan(
            over={"x": ticks(x_low, x_high, nx), "y": ticks(y_low, y_high, ny)},
            axes={"radius": np.array(RADII), **({"snapshot": path} if len(path) else {})},
            labels=where if len(path) else {},
            quantities={
                "loss": Quantity("loss", "nats"),
                "loss_se": Quantity("standard error of the loss over samples", "nats"),
                "l2": Quantity("half the squared norm of the weights" if self.l2_definition == "squared"
                               else "sum of the norms of the weight tensors"),
                "accuracy": Quantity("accuracy"),
            },
            summaries={
                "height": Quantity("mean rise of the loss at a radius", "nats", ("radius",)),
                "non_finite": Quantity("share of finished cells whose loss is not finite"),
            },
            about={
                "x": Quantity(plane.names[0], plane.units),
                "y": Quantity(plane.names[1], plane.units),
                "radius": Quantity("distance from the centre", plane.units),
                "snapshot": Quantity("snapshot of the run"),
            },
            facts={"l2_definition": self.l2_definition, "plane": plane.kind, "cosine": plane.cosine,
                   "norm_x": plane.norms[0], "norm_y": plane.norms[1]},
        )  # fmt: skip

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points with shared directions; points of one row also share w0 + x d1."""
        plane = self._plane(subject)
        with Evaluator(subject, plane, recalibration(self.bn), self.l2_definition) as evaluator:
            for unit in units:
                yield evaluator.at(float(unit.at["x"]), float(unit.at["y"]))

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Heights at the radii whose circle lies inside the finished grid."""
        loss = np.where(data["done"] == 1, data["loss"], np.nan)
        finished = loss[data["done"] == 1]
        return {
            "height": np.array([height(data["x"], data["y"], loss, radius) for radius in data["radius"]]),
            "non_finite": float((~np.isfinite(finished)).mean()) if finished.size else np.nan,
        }

    def _plane(self, subject: Subject) -> Plane:
        key = ("plane", self.plane, self.normalize, self.ignore, self.seed)
        return subject.once(
            key,
            lambda: plane_of(subject, self.plane, normalize=self.normalize, ignore=self.ignore, seed=self.seed),
        )

    def _range(self, plane: Plane) -> tuple[tuple[float, float], tuple[float, float]]:
        return spans(self.range) if self.range else plane.spans


def height(x: np.ndarray, y: np.ndarray, loss: np.ndarray, radius: float, *, angles: int = 360) -> float:
    """Mean over angles of the loss at a radius minus the centre's, bilinear between grid points; NaN outside."""
    from scipy.interpolate import RegularGridInterpolator

    if min(x[-1], -x[0], y[-1], -y[0]) < radius * (1 - 1e-9):
        return float("nan")
    between = RegularGridInterpolator((x, y), loss, bounds_error=False, fill_value=None)
    theta = np.arange(angles) * (2 * np.pi / angles)
    circle = radius * np.stack([np.cos(theta), np.sin(theta)], axis=1)
    with np.errstate(invalid="ignore"):
        return float(np.mean(between(circle)) - between((0.0, 0.0)).item())


def ticks(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spaced coordinates whose zero is exact, so that the centre is the checkpoint bit for bit."""
    values = np.linspace(low, high, count)
    return np.where(np.abs(values) < 1e-12 * (high - low), 0.0, values)


def pair(text: str, kind: type, name: str) -> tuple[Any, Any]:
    """`N` or `NX,NY`."""
    try:
        parts = [kind(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise OptionError(f"--{name} {text} is not understood; ask for N or NX,NY")
    return parts[0], parts[-1]


def spans(text: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """`R`, `LOW:HIGH` or `XLOW:XHIGH,YLOW:YHIGH` as ((x_low, x_high), (y_low, y_high))."""
    try:
        found = []
        for part in text.split(","):
            numbers = [float(number) for number in part.split(":")]
            low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
            found.append((low, high))
    except ValueError:
        found = []
    if len(found) not in (1, 2):
        raise OptionError(f"--range {text} is not understood; ask for R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH")
    for low, high in found:
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise OptionError(f"--range {text} has its low end {low:g} not below its high end {high:g}; swap them")
    return found[0], found[-1]


def recalibration(text: str) -> int:
    """Number of mini-batches that refresh batch norm at every point; 0 for `frozen`."""
    kind, _, count = text.partition(":")
    if kind == "frozen" and not count:
        return 0
    if kind == "recalibrate" and count.isdigit() and int(count) > 0:
        return int(count)
    raise OptionError(f"--bn {text} is not understood; ask for frozen or recalibrate:K with K mini-batches, at least 1")

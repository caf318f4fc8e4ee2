"""Loss along lines through the weights: one-dimensional sections, and the barrier between two checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape.curvature.vectors import inner
from landscape.options import OptionError, at_least, one_of, parse_range, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.results.statistics import mean_and_standard_error
from landscape.subject import batchnorm
from landscape.subject.batchnorm import INTERPOLATING, recalibration
from landscape.subject.checks import refuse_unsteady
from landscape.subject.derived import once_per_weights
from landscape.subject.outputs import per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.coordinates import ticks
from landscape.weight_space.directions import POSITIONS, Normalize
from landscape.weight_space.lines import Along, Section, sections_of

_log = logging.getLogger(__name__)
Samples = tuple[np.ndarray, np.ndarray]  # loss and correctness of every sample
PAIRED = {
    "excess": "loss above the straight line between the ends' losses",
    "accuracy_deficit": "accuracy below the straight line between the ends' accuracies",
}


@dataclass(frozen=True)
class Line(Probe):
    """The loss at w0 + t d, with its standard error over samples, for one direction d or several.

    Between two checkpoints, w(t) = (1 - t) w0 + t w1 (Goodfellow et al. 2015, arXiv 1412.6544). The barrier is the
    largest excess of the loss over the straight line between the ends' losses, max_t [L(t) - (1 - t) L(0) - t L(1)]
    (Frankle et al. 2020, arXiv 1912.05671); its standard error is that of the paired per-sample excess where it is
    largest. Statistics of batch norm are interpolated like the weights by default, so that either end has its own
    loss (beyond the ends they stay as there); `--bn recalibrate:K` refreshes them at every point, ends included (Jordan
    et al. 2023, arXiv 2211.08403).
    """

    name: ClassVar[str] = "line"
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": 3, "directions": 2}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {"normalize": "park2022", "split": "train", "augment": True, "weight_decay": 0.05}
    }

    along: Annotated[
        str, "random, eigen (both ends of the Hessian), B.pt (another checkpoint), RUN_DIR or DIRECTIONS.h5"
    ] = "random"
    resolution: Annotated[int, "points per line; the checkpoints themselves are added where they fall between"] = 51
    range: Annotated[str, "R or LOW:HIGH; default 1, 0:1 between checkpoints, or what curvature or a run needs"] = ""
    directions: Annotated[int, "how many random directions, or principal components of a run"] = 1
    normalize: Annotated[Normalize, "length of random directions: per filter, per layer, none, or as published"] = (
        "filter"
    )
    ignore: Annotated[str, "regular expression: parameters that no random direction moves"] = POSITIONS
    bn: Annotated[
        str,
        "batch-norm statistics: frozen, interpolate, recalibrate:K; auto interpolates between checkpoints",
    ] = "auto"
    seed: Annotated[int, "seed of the first random direction, counted up"] = 0

    def __post_init__(self) -> None:
        at_least("resolution", self.resolution, 2)
        at_least("directions", self.directions, 1)
        one_of("normalize", self.normalize, get_args(Normalize))
        regular_expression("ignore", self.ignore)
        object.__setattr__(self, "range", str(self.range))
        if self.range:
            parse_range("range", self.range)
        if self.bn not in INTERPOLATING:
            recalibration(self.bn)
        if self.bn == "interpolate" and self.along in ("random", "eigen"):
            raise OptionError(f"--bn interpolate needs another checkpoint; drop it beside --along {self.along}")
        if self.directions > 1 and self.along == "eigen":
            raise OptionError(f"--directions {self.directions} has no meaning beside --along eigen, which has two")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters as they enter the question: contents instead of paths, numbers instead of their spelling."""
        found = self._sections(subject)
        return {
            **asdict(self),
            **batchnorm.dependence(subject, self._recalibrate),
            "along": [section.identity for section in found],
            "range": "by curvature" if found[0].kind == "eigen" and not self.range else self._range(found),
            "bn": "interpolate" if self._interpolates(found) else self.bn.replace("auto", "frozen"),
        }

    def plan(self, subject: Subject) -> Plan:
        refuse_unsteady(subject)
        found = self._sections(subject)
        self._interpolates(found)  # refuses what does not go together
        if found[0].kind == "eigen" and not self.range:
            _log.info("line: --range %g:%g by the curvature of the flatter direction", *self._range(found))
        pair, per_line, meaning = found[0].kind == "checkpoints", ("direction",), subject.meaning
        paired = {
            name: Quantity(about, meaning.units) if name == "excess" else meaning.of_accuracy(about)
            for name, about in PAIRED.items()
        }
        barriers = {
            "barrier": Quantity("largest excess of the loss between the ends", meaning.units, per_line),
            "barrier_se": Quantity("standard error of the barrier over samples", meaning.units, per_line),
            "barrier_at": Quantity("where the barrier is", found[0].units, per_line),
            "accuracy_barrier": meaning.of_accuracy("largest deficit of the accuracy between the ends", per_line),
            "accuracy_barrier_se": meaning.of_accuracy("standard error of the accuracy barrier over samples", per_line),
        }
        errors = {f"{name}_se": Quantity(f"standard error of the {q.long_name}", q.units) for name, q in paired.items()}
        return Plan(
            over={"direction": np.arange(len(found)), "t": self._ticks(found)},
            labels={
                "name": (Quantity("direction", dims=per_line), np.array([section.name for section in found])),
                "norm": (Quantity("length of the direction", "weight", per_line), np.array([s.norm for s in found])),
                **(self._other_ends(subject, found) if pair else {}),
            },
            quantities={
                "loss": Quantity("loss", meaning.units),
                "loss_se": Quantity("standard error of the loss over samples", meaning.units),
                "l2": Quantity("half the squared norm of the weights"),
                "accuracy": meaning.of_accuracy("accuracy"),
                "accuracy_se": meaning.of_accuracy("standard error of the accuracy over samples"),
                **({**paired, **errors} if pair else {}),
            },
            summaries={
                "loss_mean": Quantity("mean loss over the directions", meaning.units, ("t",)),
                "loss_spread": Quantity("standard deviation of the loss over the directions", meaning.units, ("t",)),
                **(barriers if pair else {}),
            },
            about={"direction": Quantity("direction"), "t": Quantity("position on the line", found[0].units)},
            facts={"along": found[0].kind, "statistics": self._statistics(found)},
        )

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points of one line share its direction and, between two checkpoints, what both ends give."""
        found = self._sections(subject)
        for k, points in groupby(units, key=lambda unit: unit.index[0]):
            interpolate = self._interpolates(found)
            with Along(subject, found[k], interpolate=interpolate, recalibrate=self._recalibrate) as along:
                ends = self._ends(subject, found[k], along)
                for unit in points:
                    yield self._at(float(unit.at["t"]), subject, along, ends)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Mean and spread over directions where all are finished; barriers of lines finished between their ends."""
        loss, t = np.where(data["done"] == 1, data["loss"], np.nan), data["t"]
        with np.errstate(invalid="ignore"):
            spread = loss.std(axis=0, ddof=1) if len(loss) > 1 else np.full(len(t), np.nan)
            summaries: dict[str, Any] = {"loss_mean": loss.mean(axis=0), "loss_spread": spread}
        if "excess" in data:
            summaries |= _barriers(data, (t >= 0.0) & (t <= 1.0))
        return summaries

    @property
    def _recalibrate(self) -> int:
        return 0 if self.bn in INTERPOLATING else recalibration(self.bn)

    def _interpolates(self, found: Sequence[Section]) -> bool:
        pair = found[0].kind == "checkpoints"
        if self.bn == "interpolate" and not pair:
            raise ValueError(f"--bn interpolate needs another checkpoint; drop it beside --along {self.along}")
        return pair and self.bn in INTERPOLATING

    def _sections(self, subject: Subject) -> list[Section]:
        return _sections(
            subject, self.along, normalize=self.normalize, ignore=self.ignore, seed=self.seed, count=self.directions
        )

    def _range(self, found: Sequence[Section]) -> tuple[float, float]:
        if self.range:
            return parse_range("range", self.range)
        return min(section.span[0] for section in found), max(section.span[1] for section in found)

    def _ticks(self, found: Sequence[Section]) -> np.ndarray:
        """Evenly spaced, the checkpoint (and the other one) exactly among them where the range holds it."""
        low, high = self._range(found)
        values = ticks(low, high, self.resolution)
        for end in (0.0, 1.0) if found[0].kind == "checkpoints" else (0.0,):
            if low <= end <= high:
                near = np.abs(values - end) < 1e-9 * (high - low)
                values = np.where(near, end, values) if near.any() else np.union1d(values, [end])
        return values

    def _ends(self, subject: Subject, section: Section, along: Along) -> dict[float, Samples]:
        """Samples at both ends of a line between checkpoints; of another line, none."""
        if section.kind != "checkpoints":
            return {}
        found: dict[float, Samples] = _end_samples(subject, section, self.bn)
        for t in (0.0, 1.0):
            if t not in found:
                along.place(t)
                found[t] = _samples(subject)
        return found

    def _statistics(self, found: Sequence[Section]) -> str:
        if self._interpolates(found):
            return "interpolated between the checkpoints"
        return f"refreshed on {self._recalibrate} mini-batches at every point" if self._recalibrate else "frozen"

    def _other_ends(self, subject: Subject, found: Sequence[Section]) -> dict[str, tuple[Quantity, np.ndarray]]:
        """The other checkpoints' own losses, and by how much the line's differ from them."""
        how = self._interpolates(found), self._recalibrate
        own = np.array([_end_loss(subject, section, True, 0) for section in found])
        here = np.array([_end_loss(subject, section, *how) for section in found])
        if how != (True, 0):
            for section, itself, there in zip(found, own, here, strict=True):
                said = f"{section.name.removeprefix('towards ')} has the loss {there:.4g} here, {itself:.4g} by itself"
                _log.info("line: batch-norm statistics %s; %s", self._statistics(found), said)
        per_line, units = ("direction",), subject.meaning.units
        return {
            "end_loss": (Quantity("loss of the other checkpoint itself", units, per_line), own),
            "end_excess": (Quantity("loss at its end minus its own", units, per_line), here - own),
        }

    def _at(self, t: float, subject: Subject, along: Along, ends: Mapping[float, Samples]) -> Values:
        along.place(t)
        parameters = [p.detach() for p in subject.parameters.values()]
        here = ends[t] if t in ends else _samples(subject)
        (loss, loss_se), (accuracy, accuracy_se) = (mean_and_standard_error(values) for values in here)
        values = {"loss": loss, "loss_se": loss_se, "accuracy": accuracy, "accuracy_se": accuracy_se,
                  "l2": inner(parameters, parameters) / 2}  # fmt: skip
        if ends:
            for (name, sign), now, start, end in zip(
                (("excess", 1.0), ("accuracy_deficit", -1.0)), here, ends[0.0], ends[1.0], strict=True
            ):
                with np.errstate(invalid="ignore"):
                    difference = sign * (now - (1 - t) * start - t * end)
                values[name], values[f"{name}_se"] = mean_and_standard_error(difference)
        return values


_sections = once_per_weights(sections_of)


@once_per_weights
def _end_loss(subject: Subject, section: Section, interpolate: bool, recalibrate: int) -> float:
    with Along(subject, section, interpolate=interpolate, recalibrate=recalibrate) as along:
        along.place(1.0)
        return per_sample(subject)[0].mean().item()


@once_per_weights
def _end_samples(subject: Subject, section: Section, bn: str) -> dict[float, Samples]:
    """Samples at both ends of a line, which the first use of the line fills in."""
    return {}


def _samples(subject: Subject) -> Samples:
    loss, right = per_sample(subject)
    return loss.numpy(), right.numpy()


def _barriers(data: Mapping[str, np.ndarray], between: np.ndarray) -> dict[str, np.ndarray]:
    """The largest excess and deficit of every line with all its points between the ends, both included."""
    t, names = data["t"][between], ("barrier", "barrier_se", "barrier_at", "accuracy_barrier", "accuracy_barrier_se")
    found = {name: np.full(len(data["direction"]), np.nan) for name in names}
    if not {0.0, 1.0} <= set(t):
        return found
    for k in np.flatnonzero((data["done"][:, between] == 1).all(axis=1)):
        excess, deficit = data["excess"][k, between], data["accuracy_deficit"][k, between]
        top, low = int(np.argmax(excess)), int(np.argmax(deficit))
        found["barrier"][k], found["barrier_at"][k] = excess[top], t[top]
        found["barrier_se"][k] = data["excess_se"][k, between][top]
        found["accuracy_barrier"][k] = deficit[low]
        found["accuracy_barrier_se"][k] = data["accuracy_deficit_se"][k, between][low]
    return found

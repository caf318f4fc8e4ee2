"""Measure the loss along straight lines through the weights, and the barrier between two checkpoints."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np

from landscape.headline import Headline
from landscape.options import MOST_POINTS, OptionError, at_least, one_of, parse_range, regular_expression, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.products.vectors import inner
from landscape.statistics import basins
from landscape.subject import batchnorm, sample_statistics, weights_cache
from landscape.subject.subject import Subject
from landscape.weight_space import barriers, bezier, weight_uses
from landscape.weight_space.directions import IGNORE_HELP, NORMALIZE_HELP, POSITIONS, Normalize, beside_ends, ticks
from landscape.weight_space.lines import ModelOnLine, StraightLine, lines_of
from landscape.weight_space.scores import ALSO_HELP, AXES, MARGIN_HELP, Scores, check
from landscape.weight_space.weights_in_place import OWN, RunningStatistics

Connect = Literal["straight", "bezier"]
RECALIBRATED = 10  # mini-batches of batch norm's statistics on a trained curve, unless --bn says otherwise
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Line(Probe):
    """The loss at w0 + t d, with its standard error over samples, for one direction d or several.

    Between two checkpoints, w(t) = (1 - t) w0 + t w1 (Goodfellow et al. 2015, arXiv 1412.6544). The barrier is the
    largest excess of the loss over the straight line between the ends' losses, max_t [L(t) - (1 - t) L(0) - t L(1)]
    (Frankle et al. 2020, arXiv 1912.05671); its standard error is that of the paired per-sample excess there. By
    default batch norm's running statistics are interpolated like the weights, so that each end has its own loss
    (beyond an end they stay constant); `--bn recalibrate:K` refreshes them at every point, ends included (Jordan et
    al. 2023, arXiv 2211.08403).

    With `--also`, or `--margin` alone, loss and accuracy on every data set are compared with those at t = 0, and the
    radius at which each leaves its interval is stored (`statistics.basins`).
    """

    name: ClassVar[str] = "line"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"along": ("random", "eigen")}
    several: ClassVar[str] = "ends"
    checkpoints: ClassVar[str] = "checkpoints, or folders of them; two of one architecture are the ends of a line"
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"resolution": 3, "directions": 2}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {"normalize": "park2022", "split": "train", "augment": True, "weight_decay": 0.05}
    }
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("barrier", "barrier", {"direction": "largest"}, where="at {barrier_at:.4g}"),
        Headline("accuracy barrier", "accuracy_barrier", {"direction": "largest barrier"}),
        *(Headline(f"loss at {t:g}", "loss", {"direction": "largest barrier", "t": t}) for t in (0.0, 0.5, 1.0)),
        Headline("lowest loss", "loss", {"direction": "largest barrier", "t": "smallest"}, where="at {t:.4g}"),
        *basins.LINE,
        *basins.HEADLINES,
    )

    along: Annotated[
        str, "random, eigen (extreme Hessian eigenvectors), B.pt (another checkpoint), RUN_DIR or DIRECTIONS.h5"
    ] = "random"
    resolution: Annotated[
        int, "points per line; checkpoints between them are added, and between checkpoints two points near each end"
    ] = 51
    range: Annotated[str, "R or LOW:HIGH; default 1, 0:1 between checkpoints, or set by the curvature or the run"] = ""
    directions: Annotated[int, "number of random directions, or of principal components of a run"] = 1
    normalize: Annotated[Normalize, NORMALIZE_HELP] = "filter"
    ignore: Annotated[str, IGNORE_HELP] = POSITIONS
    bn: Annotated[
        str, "batch norm: frozen, interpolate, recalibrate:K (on K mini-batches); auto interpolates between checkpoints"
    ] = "auto"
    connect: Annotated[
        Connect, "straight, or bezier: a curve of low loss to another checkpoint, trained on the train split"
    ] = "straight"
    connect_epochs: Annotated[int, "epochs over the train split in which the curve is trained"] = 10
    connect_rate: Annotated[float, "learning rate of the curve's training, by SGD with momentum"] = 0.01
    connect_batch_size: Annotated[int, "samples per mini-batch of the curve's training"] = 128
    also: Annotated[tuple[str, ...], ALSO_HELP] = ()
    margin: Annotated[str, MARGIN_HELP] = ""
    seed: Annotated[int, "seed of the first random direction; each further one uses the next seed"] = 0

    def __post_init__(self) -> None:
        at_least("resolution", self.resolution, 2)
        require(self.resolution <= MOST_POINTS, "resolution", self.resolution, f"at most {MOST_POINTS:,} points")
        at_least("directions", self.directions, 1)
        one_of("normalize", self.normalize, get_args(Normalize))
        regular_expression("ignore", self.ignore)
        make_texts(self, "range", "margin")
        check(self.also, self.margin)
        if self.range:
            parse_range("range", self.range)
        RunningStatistics.parse(self.bn)
        if self.bn == "interpolate" and self.along in ("random", "eigen"):
            raise OptionError(f"--bn interpolate needs another checkpoint; drop it for --along {self.along}")
        one_of("connect", self.connect, get_args(Connect))
        at_least("connect_epochs", self.connect_epochs, 1)
        at_least("connect_batch_size", self.connect_batch_size, 2)
        require(0 < self.connect_rate < math.inf, "connect_rate", self.connect_rate, "above 0")
        if self.connect == "bezier" and self.along == "eigen":
            raise OptionError(f"--connect bezier needs another checkpoint, got --along {self.along}: line A.pt B.pt")
        if self.directions > 1 and self.along == "eigen":
            raise OptionError(f"--directions {self.directions} cannot be combined with --along eigen, which has two")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters in the run key: contents instead of paths, numbers instead of their spelling."""
        lines = self._lines(subject)
        statistics = self._statistics(subject, lines)
        curve = self.connect != "straight"
        unused = [field.name for field in fields(self) if field.name.startswith("connect") and not curve]
        scores = self._scores(subject, statistics)
        return {
            **dict.fromkeys(unused),
            **(scores.identity() if scores else {}),
            **batchnorm.dependence(subject, statistics.recalibrate),
            "along": [line.identity for line in lines],
            "range": "by curvature" if lines[0].kind == "eigen" and not self.range else self._range(lines),
            "bn": "interpolate"
            if statistics.interpolate
            else str(statistics)
            if curve
            else self.bn.replace("auto", "frozen"),
        }

    def plan(self, subject: Subject) -> Plan:
        lines = self._lines(subject)
        statistics = self._statistics(subject, lines)
        if lines[0].kind == "eigen" and not self.range:
            _log.info("line: --range %g:%g from the curvature along the flatter direction", *self._range(lines))
        pair, per_line, meaning = lines[0].kind == "checkpoints", ("direction",), subject.meaning
        scores = self._scores(subject, statistics)
        return Plan(
            over={"direction": np.arange(len(lines)), "t": self._ticks(lines)},
            axes={**scores.axes(), "side": np.array(basins.SIDES)} if scores else {},
            labels={
                "name": (Quantity("direction", dims=per_line), np.array([line.name for line in lines])),
                "norm": (Quantity("length of the direction", "weight", per_line), np.array([d.norm for d in lines])),
                **(self._other_ends(subject, lines) if pair else {}),
                **(scores.labels() if scores else {}),
            },
            quantities={
                **barriers.means(meaning),
                "l2": Quantity("half the squared norm of the weights"),
                **(barriers.paired(meaning) if pair else {}),
                **(basins.MEASURED if scores else {}),
            },
            summaries={
                "loss_mean": Quantity("mean loss over the directions", meaning.units, ("t",)),
                "loss_spread": Quantity("standard deviation of the loss over the directions", meaning.units, ("t",)),
                **(barriers.summaries(meaning, per_line) if pair else {}),
                **(basins.summaries(lines[0].units, plane=False) if scores else {}),
            },
            about={
                "t": Quantity("position on the line", lines[0].units),
                **(AXES if scores else {}),
                **({"side": Quantity("sign of t")} if scores else {}),
            },
            facts={
                "along": lines[0].kind,
                **({"connect": self.connect} if self.connect != "straight" else {}),
                "statistics": str(statistics),
                **({"filters": lines[0].filters} if lines[0].filters else {}),
                "not_moved": weight_uses.not_moved(subject, [line.direction for line in lines]),
            },
        )

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Points of one line share its direction and, between two checkpoints, the samples' losses at both ends."""
        lines = self._lines(subject)
        statistics = self._statistics(subject, lines)
        scores = self._scores(subject, statistics)
        if scores:
            scores.at_checkpoint()  # before the first move

        def more(samples: barriers.Samples) -> Values:
            parameters = [p.detach() for p in subject.parameters.values()]
            return {"l2": inner(parameters, parameters) / 2, **(scores.values_at(samples) if scores else {})}

        for k, some in groupby(units, key=lambda unit: unit.index[0]):
            yield from barriers.points(subject, lines[k], statistics, (float(unit.at["t"]) for unit in some), more)

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Mean and spread over directions at points finished on all; barriers of lines finished between their ends."""
        loss, t = np.where(data["done"] == 1, data["loss"], np.nan), data["t"]
        with np.errstate(invalid="ignore"):
            spread = loss.std(axis=0, ddof=1) if len(loss) > 1 else np.full(len(t), np.nan)
            summaries: dict[str, Any] = {"loss_mean": loss.mean(axis=0), "loss_spread": spread}
        if "excess" in data:
            summaries |= barriers.highest(data)
        if "score_worse" in data:
            summaries |= basins.of_lines(data, forward="excess" in data)
        return summaries

    def _scores(self, subject: Subject, statistics: RunningStatistics) -> Scores | None:
        return Scores.of(subject, self.also, self.margin, recalibrate=statistics.recalibrate)

    def _statistics(self, subject: Subject, lines: Sequence[StraightLine]) -> RunningStatistics:
        pair = lines[0].kind == "checkpoints"
        if self.connect == "bezier" and self.bn == "auto" and batchnorm.has_statistics(subject.model):
            return RunningStatistics(recalibrate=min(RECALIBRATED, len(subject.batches)))
        if self.bn == "interpolate" and not pair:
            raise ValueError(f"--bn interpolate needs another checkpoint; drop it for --along {self.along}")
        return RunningStatistics.parse(self.bn, interpolate=pair)

    def _lines(self, subject: Subject) -> list[StraightLine]:
        lines = self._straight(subject)
        if self.connect == "straight":
            return lines
        how = bezier.CurveTraining(self.connect_epochs, self.connect_rate, self.connect_batch_size, self.seed)
        return [_curved(subject, line, how) for line in lines]

    def _straight(self, subject: Subject) -> list[StraightLine]:
        drawn: dict[str, Any] = {name: getattr(self, name) for name in ("normalize", "ignore", "seed")}
        lines = _lines(subject, self.along, **drawn, count=self.directions)
        if self.connect == "bezier" and lines[0].kind != "checkpoints":
            raise ValueError(f"--connect bezier needs another checkpoint, got --along {self.along}: line A.pt B.pt")
        return lines

    def _range(self, lines: Sequence[StraightLine]) -> tuple[float, float]:
        if self.range:
            return parse_range("range", self.range)
        return min(line.span[0] for line in lines), max(line.span[1] for line in lines)

    def _ticks(self, lines: Sequence[StraightLine]) -> np.ndarray:
        """Evenly spaced; the checkpoint (or both) within the range is exactly one of them, added if necessary."""
        low, high = self._range(lines)
        values = ticks(low, high, self.resolution)
        for end in (0.0, 1.0) if lines[0].kind == "checkpoints" else (0.0,):
            if low <= end <= high:
                near = np.abs(values - end) < 1e-9 * (high - low)
                values = np.where(near, end, values) if near.any() else np.union1d(values, [end])
        return beside_ends(values) if lines[0].kind == "checkpoints" else values

    def _other_ends(self, subject: Subject, lines: Sequence[StraightLine]) -> dict[str, tuple[Quantity, np.ndarray]]:
        """The other checkpoints' own losses, and by how much the line's differ from them."""
        statistics = self._statistics(subject, lines)
        own, shown = (np.array([_end_loss(subject, line, s) for line in lines]) for s in (OWN, statistics))
        for line, itself, there in zip(lines, own, shown, strict=True) if statistics != OWN else ():
            words = f"{line.name.removeprefix('towards ')} has the loss {there:.4g} here, {itself:.4g} by itself"
            _log.info("line: batch-norm statistics %s; %s", statistics, words)
        per_line, units = ("direction",), subject.meaning.units
        return {
            "end_loss": (Quantity("loss of the other checkpoint itself", units, per_line), own),
            "end_excess": (Quantity("loss at its end minus its own", units, per_line), shown - own),
        }


_lines = weights_cache.once_per_weights(lines_of)
_curved = weights_cache.once_per_weights(bezier.curved)


@weights_cache.once_per_weights
def _end_loss(subject: Subject, line: StraightLine, statistics: RunningStatistics) -> float:
    with ModelOnLine(subject, line, statistics) as model:
        model.move_to(1.0)
        return sample_statistics.per_sample(subject)[0].mean().item()

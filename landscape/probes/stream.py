"""Measure temporal smoothing: predictions averaged over neighbouring frames of a stream (VQ-BNN, Park et al. 2021)."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from landscape.data.dataset import BatchList
from landscape.headline import LOWER, Headline
from landscape.options import OptionError, at_least, parse_numbers, require
from landscape.predictions import timing
from landscape.predictions.frames import (
    DENSE,
    PER_FRAME,
    SCORES,
    TERMS,
    FrameProbabilities,
    frame_scores,
    frame_weights,
    near_boundary,
    networks_of,
    smoothed,
    suffixed,
    summaries,
)
from landscape.predictions.member_networks import member_networks
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.subject import mc_dropout
from landscape.subject.subject import Subject, more_samples

_log = logging.getLogger(__name__)


class Method(NamedTuple):
    """How a frame is predicted."""

    name: str
    tau: float  # 0: without smoothing
    passes: int  # networks, or dropout masks, per frame
    prediction: int  # position among the `FrameProbabilities` of a frame


@dataclass(frozen=True)
class Stream(Probe):
    """p_t = sum_s w_s softmax(f(x_{t-s})), w_s proportional to exp(-|s| / tau), over past and future frames.

    Every frame goes through the network once, for all tau: `deterministic` is that pass, `temporal` its mean over
    frames, once per tau. With MC dropout of N members `mc_dropout` is the mean of N passes per frame, not smoothed, and
    `mc_dropout_temporal` (VQ-BNN) smooths one pass per frame, whose masks differ from frame to frame. With further
    networks (`members`) `ensemble` is the mean of all of them on every frame, and `ensemble_temporal` smooths one
    network per frame, in turn: a deep ensemble at one pass per frame.
    Weights are normalised over the frames that exist, so that the first frames of a clip have fewer. Intervals resample
    blocks of frames, because neighbouring frames are dependent.
    """

    name: ClassVar[str] = "stream"
    places: ClassVar[Mapping[str, Sequence[str]]] = {"members": ()}
    ordered: ClassVar[bool] = True
    batch_size: ClassVar[int] = 16
    smallest: ClassVar[Mapping[str, Any]] = {"tau": "1", "timed": 0}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("nll", "nll", {"method": "deterministic"}, LOWER),
        Headline("smoothed", "nll", {"method": "best"}, LOWER, "at tau {tau:.4g}"),
        Headline("ece", "ece", {"method": "deterministic"}, LOWER),
        Headline("smoothed ece", "ece", {"method": "best"}, LOWER),
        *(
            Headline(f"throughput {name.replace('_', ' ')}", "throughput", {"method": name},
                     by="throughput at deterministic")
            for name in ("temporal", "mc_dropout", "mc_dropout_temporal", "ensemble", "ensemble_temporal")
        ),
    )  # fmt: skip

    tau: Annotated[str, "decay of the weights in frames; several such as 1,2 cost no further pass"] = "0.5,1,2,4"
    members: Annotated[str, "further networks B.pt,C.pt: all of them on every frame, and one per frame in turn"] = ""
    past: Annotated[int, "earlier frames that are averaged"] = 5
    look_ahead: Annotated[int, "later frames that are averaged, by which the prediction is delayed"] = 0
    clip_length: Annotated[int, "frames per clip, beyond which nothing is averaged; 0: the stream is one clip"] = 0
    boundary: Annotated[int, "pixels at most this far from another class count as its boundary (of masks)"] = 2
    block_length: Annotated[int, "frames per block of the bootstrap; 0: a clip, or else from the number of frames"] = 0
    timed: Annotated[int, "frames by which prediction time and throughput are measured; 0 leaves them out"] = 50
    seed: Annotated[int, "seed of the bootstrap"] = 0

    def __post_init__(self) -> None:
        make_texts(self, "tau")
        above = all(0 < value < math.inf for value in parse_numbers("tau", self.tau))
        require(above, "tau", self.tau, "numbers above 0")
        for name, least in (("past", 0), ("look_ahead", 0), ("boundary", 1), ("block_length", 0), ("timed", 0)):
            at_least(name, getattr(self, name), least)
        require(self.clip_length == 0 or self.clip_length >= 2, "clip_length", self.clip_length, "0, or at least 2")
        require(self.past + self.look_ahead > 0, "past", self.past, "at least 1, or --look-ahead 1")

    def identity(self, subject: Subject) -> dict[str, Any]:
        """Texts parsed to numbers; the timing does not matter."""
        members = (
            [network.sha256 for network in member_networks(subject, self._others, "", 0)] if self.members else None
        )
        return {"timed": None, "tau": list(self._taus), "members": members}

    def plan(self, subject: Subject) -> Plan:
        classes = _refuse_other_than_frames(subject)
        dims, frames, methods = ("method",), len(subject), self._methods(subject)
        named = {
            name: value for name, value in NAMES.items() if subject.dense or name.removesuffix("_frame") not in DENSE
        }
        quantities = {name: _quantity(*named[name]) for name in PER_FRAME if name in named}
        quantities["terms"] = Quantity("sums of the calibration metrics", dims=(*dims, "term"))
        axes = {"method": np.arange(len(methods)), "term": np.arange(TERMS)}
        if subject.dense:
            axes["class"] = np.arange(classes)
            for name in ("intersection", "union"):
                quantities[name] = Quantity(f"{name} of predicted and true pixels", "pixels", (*dims, "class"))
        counts = {"past": self.past, "look_ahead": self.look_ahead, "frames": self.timed}
        seconds = timing.prediction_time(subject, self._others, tau=self._taus[-1], **counts) if self.timed else {}
        columns = zip(*((*one[:3], *_times(seconds.get(one.name, ()))) for one in methods), strict=True)
        labels = {
            key: (_summary(key, *about), np.array(column))
            for (key, about), column in zip(OF_METHODS.items(), columns, strict=True)
        }
        blocks = {"blocks": int(self._blocks(frames).max()) + 1, "block_length": self._block_length(frames)}
        return Plan(
            over={"frame": np.arange(frames)},
            axes=axes,
            labels=labels,
            quantities=quantities,
            summaries={
                **{key: _summary(key, *named[name]) for name in SCORES if name in named for key in suffixed(name)},
                "best": Quantity("position of the temporal method with the lowest NLL; 0: none", dtype="int64"),
            },
            facts={"frames": frames, **blocks},
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Frames in their order: each goes through the network once, and its probabilities are kept while needed."""
        logs, methods = FrameProbabilities(subject, networks_of(subject, self._others)), self._methods(subject)
        at, before = -2, torch.empty(0)  # the frame that was smoothed last
        for frames, some in itertools.groupby((unit.index[0] for unit in units), logs.block):
            start = frames[0]
            if not self._opens(start) and at != start - 1:
                before = self._smoothed(logs, methods, logs.block(start - 1))[-1:]
            now = self._smoothed(logs, methods, frames)
            found = self._scores(subject, logs, frames, now, before)
            yield from ({name: values[t - start] for name, values in found.items()} for t in some)
            at, before = frames[-1], now[-1:]

    def _scores(
        self, subject: Subject, logs: FrameProbabilities, frames: range, now: Tensor, before: Tensor
    ) -> dict[str, np.ndarray]:
        """What is stored of consecutive frames, (frame, method, ...), `before` being the one before them."""
        earlier = torch.cat([before if len(before) else torch.full_like(now[:1], torch.nan), now[:-1]])
        earlier[[self._opens(t) for t in frames]] = torch.nan
        targets, each = logs.targets(frames), now.shape[1]
        boundary = None
        if subject.dense:
            near = torch.stack([near_boundary(target, self.boundary) for target in targets])
            boundary = near.repeat_interleave(each, dim=0)
        found = frame_scores(
            now.flatten(0, 1), targets.repeat_interleave(each, dim=0), before=earlier.flatten(0, 1), boundary=boundary
        )
        return {name: values.reshape(*now.shape[:2], *values.shape[1:]) for name, values in found.items()}

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Scores over the finished frames with intervals, and their change by smoothing."""
        found = summaries(data, self._blocks(len(data["done"])), self.seed)
        smoothed = found["nll"][1 : 1 + len(self._taus)]
        best = 1 + np.nanargmin(smoothed) if np.isfinite(smoothed).any() else 0
        return {**found, "best": best}

    def _smoothed(self, logs: FrameProbabilities, methods: Sequence[Method], frames: range) -> Tensor:
        """Log probabilities of consecutive frames, (frames, method, C, ...)."""
        found = []
        for (behind, ahead), some in itertools.groupby(frames, partial(self._reach, len(logs))):
            own = list(some)
            window = logs.of(range(own[0] - behind, own[-1] + ahead + 1))
            logs.forget(before=own[0] - behind - 1)
            windows = torch.stack([window[i : i + len(own)] for i in range(behind + ahead + 1)])
            offsets = torch.arange(-behind, ahead + 1)
            every = [smoothed(windows[:, :, one.prediction], frame_weights(offsets, one.tau)) for one in methods]
            found.append(torch.stack(every, dim=1))
        return torch.cat(found)

    def _reach(self, frames: int, t: int) -> tuple[int, int]:
        """How many frames before and after frame t exist in its window."""
        start, end = 0, frames
        if self.clip_length:
            start = t - t % self.clip_length
            end = min(start + self.clip_length, end)
        return min(self.past, t - start), min(self.look_ahead, end - 1 - t)

    def _opens(self, t: int) -> bool:
        return t % self.clip_length == 0 if self.clip_length else t == 0

    def _methods(self, subject: Subject) -> list[Method]:
        """The network by itself, then with dropout masks or further networks: without smoothing, and by every tau."""
        if self._others and subject.members:
            raise OptionError(
                f"--members {self.members} takes one network per frame, --mc-dropout {subject.members} one mask; drop "
                "one"
            )
        found = [Method("deterministic", 0.0, 1, 0), *(Method("temporal", tau, 1, 0) for tau in self._taus)]
        if subject.members or self._others:
            name, several = ("mc_dropout", subject.members) if subject.members else ("ensemble", 1 + len(self._others))
            found += [Method(name, 0.0, several, 1), *(Method(f"{name}_temporal", tau, 1, 2) for tau in self._taus)]
        return found

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(filter(None, self.members.split(",")))

    @property
    def _taus(self) -> tuple[float, ...]:
        return tuple(sorted(set(parse_numbers("tau", self.tau))))

    def _block_length(self, frames: int) -> int:
        """Frames per block: several times the window, whose frames share predictions, but at least five blocks."""
        usual = self.clip_length or min(
            max(2 * (self.past + self.look_ahead + 1), math.isqrt(frames)), max(frames // 5, 1)
        )
        return self.block_length or usual

    def _blocks(self, frames: int) -> np.ndarray:
        return np.arange(frames) // self._block_length(frames)


NAMES = {  # of scores: long name and units
    "nll": ("negative log likelihood", "nats"), "accuracy": ("accuracy",),
    "top5": ("right class among the first five",),
    "brier": ("Brier score",), "ece": ("expected calibration error",),
    "ece_signed": ("confidence - accuracy",), "accuracy_90": ("accuracy at confidence above 0.9",),
    "uncertainty_90": ("share of wrong predictions with confidence of at most 0.9",),
    "frequency_90": ("share with confidence above 0.9",), "mean_iou": ("mean intersection over union",),
    "consistency": ("share of predictions equal to those of the frame before",),
    "consistency_nll": ("cross-entropy between a prediction and that of the frame before", "nats"),
    "boundary_nll": ("negative log likelihood near boundaries", "nats"),
    "boundary_accuracy": ("accuracy near boundaries",),
    "interior_nll": ("negative log likelihood away from boundaries", "nats"),
    "interior_accuracy": ("accuracy away from boundaries",),
    "frame_nll": ("negative log likelihood of the frame", "nats"), "frame_accuracy": ("accuracy in the frame",),
    "frame_consistency": ("share of predictions equal to those of the frame before",),
    "frame_consistency_nll": ("cross-entropy between its predictions and those of the frame before", "nats"),
    "boundary_nll_frame": ("negative log likelihood near boundaries in the frame", "nats"),
    "boundary_accuracy_frame": ("accuracy near boundaries in the frame",),
    "interior_nll_frame": ("negative log likelihood away from boundaries in the frame", "nats"),
    "interior_accuracy_frame": ("accuracy away from boundaries in the frame",),
}  # fmt: skip
OF_METHODS = {  # likewise: the first fields of `Method`, and the numbers of `_times`
    "method_name": ("method",), "tau": ("decay of the weights; 0: no smoothing", "frames"),
    "passes": ("networks or dropout masks per frame",), "throughput": ("throughput", "frames/s"),
    **dict.fromkeys((f"seconds_per_frame{end}" for end in ("", "_low", "_high")), ("prediction time of a frame", "s")),
}  # fmt: skip


def _quantity(long_name: str, units: str = "1") -> Quantity:
    return Quantity(long_name, units, ("method",))


def _summary(key: str, long_name: str, units: str = "1") -> Quantity:
    end = {"low": ", lower end of its 95 % interval", "high": ", upper end of its 95 % interval"}
    changed = ", change from the method without smoothing" if "_change" in key else ""
    return _quantity(f"{long_name}{changed}{end.get(key.rpartition('_')[2], '')}", units)


def _times(seconds: Sequence[float]) -> list[float]:
    """Frames per second, and the mean of the seconds with the ends of its interval; NaN without any."""
    return [1 / median(seconds), *timing.facts("", seconds).values()] if seconds else [math.nan] * 4


def _refuse_other_than_frames(subject: Subject) -> int:
    """Reject data that are no frames with a class, or a mask, each; the number of classes of the model."""
    inputs, targets = mc_dropout.as_is(subject).batch(0)
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor) or isinstance(subject.batches, BatchList):
        raise ValueError(
            "stream needs frames of one size as one tensor each; give frames (T, C, H, W) and their labels"
        )
    if targets.is_floating_point() or not (targets.dim() == 1 or subject.dense):
        raise ValueError(
            f"stream needs a class per frame or per pixel, got targets {tuple(targets.shape)}; give integers (T,) or "
            "(T, H, W)"
        )
    if len(subject) < 2:
        raise ValueError(f"{subject.data.in_words} has one frame, and a stream at least two; {more_samples(subject)}")
    if subject.spec is not None and subject.data.name != "in memory" and not subject.spec.ordered:
        _log.warning(
            "note: %s was loaded in balanced order, not as a stream; load it with ordered=True", subject.data.name
        )
    with subject.evaluating():
        return int(mc_dropout.as_is(subject).outputs(inputs[:1]).shape[1])

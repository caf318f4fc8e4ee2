"""Measure temporal smoothing: predictions averaged over neighbouring frames of a stream (VQ-BNN, Park et al. 2021)."""

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, ClassVar

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
    prediction_time,
    smoothed,
    suffixed,
    summaries,
)
from landscape.predictions.member_networks import member_networks
from landscape.probe import Plan, Probe, Quantity, Unit, Values, make_texts
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.subject import Subject

DETERMINISTIC = "deterministic"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stream(Probe):
    """p_t = sum_s w_s softmax(f(x_{t-s})), w_s proportional to exp(-|s| / tau), over past and future frames.

    Every frame goes through the network once, for all tau; the first of them is 0, without smoothing. With MC dropout
    of N members there are two predictions more: the mean of N passes per frame, and one pass per frame, whose masks
    differ from frame to frame. With further networks (`members`) these are the mean of all of them on every frame, and
    one network per frame, in turn, so that smoothing averages over a deep ensemble at one pass per frame.
    Weights are normalised over the frames that exist, so that the first frames of a clip have fewer. Intervals resample
    blocks of frames, because neighbouring frames are dependent.
    """

    name: ClassVar[str] = "stream"
    ordered: ClassVar[bool] = True
    batch_size: ClassVar[int] = 16
    smallest: ClassVar[Mapping[str, Any]] = {"tau": "1", "timed": 0}
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("nll", "nll", {"prediction": 0, "tau": 0}, LOWER),
        Headline("smoothed", "nll", {"prediction": 0, "tau": "best"}, LOWER, "at tau {tau:.4g}"),
        Headline("ece", "ece", {"prediction": 0, "tau": 0}, LOWER),
        Headline("smoothed ece", "ece", {"prediction": 0, "tau": "best"}, LOWER),
        *(
            Headline(f"throughput {way.replace('_', ' ')}", f"frames_per_second_{way}",
                     by="frames_per_second_deterministic")
            for way in ("smoothed", "mc_dropout")
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
        per_pair, frames, names = ("prediction", "tau"), len(subject), self._predictions(subject)
        named = {
            name: value for name, value in NAMES.items() if subject.dense or name.removesuffix("_frame") not in DENSE
        }
        quantities = {name: _quantity(*named[name]) for name in PER_FRAME if name in named}
        quantities["terms"] = Quantity("sums of the calibration metrics", dims=(*per_pair, "term"))
        axes = {"prediction": np.arange(len(names)), "tau": np.array(self._taus), "term": np.arange(TERMS)}
        if subject.dense:
            axes["class"] = np.arange(classes)
            for name in ("intersection", "union"):
                quantities[name] = Quantity(f"{name} of predicted and true pixels", "pixels", (*per_pair, "class"))
        labels = {"name": (Quantity("prediction", dims=("prediction",)), np.array(names))}
        scores = {name: named[name] for name in SCORES if name in named}
        blocks = self._blocks(frames)
        facts: dict[str, str | int | float] = {
            "frames": frames, "blocks": int(blocks.max()) + 1, "block_length": self._block_length(frames),
            "members": subject.members, "networks": 1 + len(self._others),
        }  # fmt: skip
        for way, seconds in _timed(subject, self).items() if self.timed else ():
            facts[f"frames_per_second_{way}"] = 1 / median(seconds)
            facts |= timing.facts(f"seconds_per_frame_{way}", seconds)
        return Plan(
            over={"frame": np.arange(frames)},
            axes=axes,
            labels=labels,
            quantities=quantities,
            summaries={
                **{key: _summary(key, *about) for name, about in scores.items() for key in suffixed(name)},
                "best": Quantity("position of the tau with the lowest NLL of a smoothed pass; 0: none", dtype="int64"),
            },
            about={"tau": Quantity("decay of the weights; 0: no smoothing", "frames")},
            facts=facts,
        )  # fmt: skip

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Frames in their order: each goes through the network once, and its probabilities are kept while needed."""
        logs = FrameProbabilities(subject, networks_of(subject, self._others))
        at, before = -2, torch.empty(0)  # the frame that was smoothed last
        for frames, some in itertools.groupby((unit.index[0] for unit in units), logs.block):
            start = frames[0]
            if not self._opens(start) and at != start - 1:
                before = self._smoothed(logs, logs.block(start - 1))[-1:]
            now = self._smoothed(logs, frames)
            found = self._scores(subject, logs, frames, now, before)
            yield from ({name: values[t - start] for name, values in found.items()} for t in some)
            at, before = frames[-1], now[-1:]

    def _scores(
        self, subject: Subject, logs: FrameProbabilities, frames: range, now: Tensor, before: Tensor
    ) -> dict[str, np.ndarray]:
        """What is stored of consecutive frames, (frame, prediction, tau, ...), `before` being the one before them."""
        earlier = torch.cat([before if len(before) else torch.full_like(now[:1], torch.nan), now[:-1]])
        earlier[[self._opens(t) for t in frames]] = torch.nan
        targets, each = logs.targets(frames), now.shape[1] * now.shape[2]
        boundary = None
        if subject.dense:
            near = torch.stack([near_boundary(target, self.boundary) for target in targets])
            boundary = near.repeat_interleave(each, dim=0)
        found = frame_scores(
            now.flatten(0, 2), targets.repeat_interleave(each, dim=0), before=earlier.flatten(0, 2), boundary=boundary
        )
        return {name: values.reshape(*now.shape[:3], *values.shape[1:]) for name, values in found.items()}

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values:
        """Scores over the finished frames with intervals, and their change by smoothing."""
        found = summaries(data, self._blocks(len(data["done"])), self.seed)
        smoothed = found["nll"][0, 1:]
        best = 1 + np.nanargmin(smoothed) if np.isfinite(smoothed).any() else 0
        return {**found, "best": best}

    def _smoothed(self, logs: FrameProbabilities, frames: range) -> Tensor:
        """Log probabilities of consecutive frames, (frames, prediction, tau, C, ...)."""
        found = []
        for (behind, ahead), some in itertools.groupby(frames, partial(self._reach, len(logs))):
            own = list(some)
            window = logs.of(range(own[0] - behind, own[-1] + ahead + 1))
            logs.forget(before=own[0] - behind - 1)
            windows = torch.stack([window[i : i + len(own)] for i in range(behind + ahead + 1)])
            offsets = torch.arange(-behind, ahead + 1)
            every = [smoothed(windows, frame_weights(offsets, tau)) for tau in self._taus]
            found.append(torch.stack(every, dim=2))
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

    def _predictions(self, subject: Subject) -> list[str]:
        if self._others and subject.members:
            raise OptionError(
                f"--members {self.members} takes one network per frame, --mc-dropout {subject.members} one mask; drop "
                "one"
            )
        n = 1 + len(self._others)
        return [*predictions(subject), *((f"ensemble, {n} networks", f"{n} networks, 1 per frame") if n > 1 else ())]

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(filter(None, self.members.split(",")))

    @property
    def _taus(self) -> tuple[float, ...]:
        return (0.0, *sorted(set(parse_numbers("tau", self.tau))))

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


def _quantity(long_name: str, units: str = "1") -> Quantity:
    return Quantity(long_name, units, ("prediction", "tau"))


def _summary(key: str, long_name: str, units: str = "1") -> Quantity:
    end = {"low": ", lower end of its 95 % interval", "high": ", upper end of its 95 % interval"}
    changed = ", change by smoothing" if "_change" in key else ""
    return _quantity(f"{long_name}{changed}{end.get(key.rpartition('_')[2], '')}", units)


def predictions(subject: Subject) -> list[str]:
    """The kinds of predictions of one network."""
    n = subject.members
    return [DETERMINISTIC, *((f"MC dropout, {n} passes", "MC dropout, 1 pass") if n else ())]


@weights_cache.once_per_weights
def _timed(subject: Subject, probe: Stream) -> dict[str, list[float]]:
    return prediction_time(
        subject, tau=probe._taus[-1], past=probe.past, look_ahead=probe.look_ahead, frames=probe.timed
    )


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
        raise ValueError(f"{subject.data.in_words} has one frame, and a stream at least two; give more with --samples")
    if subject.spec is not None and subject.data.name != "in memory" and not subject.spec.ordered:
        _log.warning(
            "note: %s was loaded in balanced order, not as a stream; load it with ordered=True", subject.data.name
        )
    with subject.evaluating():
        return int(mc_dropout.as_is(subject).outputs(inputs[:1]).shape[1])

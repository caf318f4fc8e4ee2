"""Log probabilities of the frames of a stream, smoothed over neighbours (Park et al. 2021), and their scores."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.data.structure import rows_of
from landscape.predictions.member_networks import member_networks
from landscape.predictions.scores import overlaps, score_rows
from landscape.statistics import calibration
from landscape.subject import mc_dropout, weights_cache
from landscape.subject.subject import Subject


def frame_weights(offsets: Tensor, tau: float) -> Tensor:
    """Weights of frames at the given distances in time, proportional to exp(-|s| / tau), with the sum 1.

    tau = 0 gives all weight to the frame itself.
    """
    weights = (offsets == 0).double() if tau == 0 else torch.exp(-offsets.abs().double() / tau)
    return weights / weights.sum()


def smoothed(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """Logarithm of sum_s w_s p_s, of log probabilities (frames, ...) and weights (frames,), without underflow."""
    used = weights > 0
    logs, shares = log_probabilities[used], weights[used].log().to(log_probabilities)
    return logs[0] if len(logs) == 1 else (logs + shares.view(-1, *(1,) * (logs.dim() - 1))).logsumexp(dim=0)


class RingBuffer:
    """The probabilities of the last frames, and their weighted mean, as a video player needs it: one pass per frame.

    With look-ahead the mean belongs to the frame that lies so many frames back.
    """

    def __init__(self, tau: float, past: int, look_ahead: int) -> None:
        self._offsets = torch.arange(past + look_ahead + 1) - look_ahead  # age of a frame -> its distance in time
        self._weights = frame_weights(self._offsets, tau)
        self._buffer = torch.empty(0)
        self._by_place: list[Tensor] = []  # for each place of the newest frame the weights of all places
        self._count = 0

    def push(self, probabilities: Tensor) -> Tensor:
        """Add the probabilities of a frame; the weighted mean over those in the buffer, of the same shape."""
        size = len(self._weights)
        if not self._count:
            self._buffer = probabilities.new_zeros((size, probabilities.numel()))
            ages = [(newest - torch.arange(size)) % size for newest in range(size)]
            self._by_place = [self._weights[age].to(probabilities) for age in ages]
        place = self._count % size
        self._buffer[place] = probabilities.reshape(-1)
        self._count += 1
        mean = self._by_place[place] @ self._buffer
        if self._count < size:  # the places that are still empty have no weight
            mean = mean / self._weights[: self._count].sum().to(mean)
        return mean.view_as(probabilities)


@weights_cache.once_per_weights
def networks_of(subject: Subject, others: tuple[str, ...]) -> list[Subject]:
    """Other checkpoints on the frames of a subject.

    Raises:
        FileNotFoundError, ValueError: a checkpoint cannot be read, or is of other data or classes.
    """
    if not others:
        return []
    found = [network.load(subject) for network in member_networks(subject, others, "", 0)[1:]]
    plain = mc_dropout.as_is(subject)
    frame = rows_of(plain.batch(0)[0], slice(1))
    with subject.evaluating():
        for other in found:
            own, theirs = (one.outputs(frame).shape for one in (plain, other))
            if own != theirs:
                raise ValueError(
                    f"{other.label} predicts {theirs[1]} classes and {subject.label} {own[1]}, expected networks of "
                    "the same classes; leave one of them out of --members"
                )
    return found


class FrameProbabilities:
    """Log probabilities of every frame, (prediction, C, ...), from one pass per mini-batch and member or network."""

    def __init__(self, subject: Subject, others: Sequence[Subject] = ()) -> None:
        self._subject, self._plain, self._others = subject, mc_dropout.as_is(subject), others
        sizes = [subject.samples(i) for i in range(len(subject.batches))]
        self._starts = np.cumsum([0, *sizes])
        self._block = range(0)  # the last one that was asked for
        self._known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # mini-batch -> log probabilities (prediction, N, ...), targets

    def __len__(self) -> int:
        return int(self._starts[-1])

    def of(self, frames: range) -> Tensor:
        """Log probabilities of consecutive frames, (frames, prediction, C, ...)."""
        return torch.cat([self._batch(i)[0][:, rows] for i, rows in self._places(frames)], dim=1).transpose(0, 1)

    def targets(self, frames: range) -> Tensor:
        """Targets of consecutive frames, (frames,) or (frames, H, W)."""
        return torch.cat([self._batch(i)[1][rows] for i, rows in self._places(frames)])

    def block(self, t: int) -> range:
        """The frames of which frame t is one that are smoothed and scored at once: some that share a mini-batch.

        They do not depend on those that are asked for, so that a resumed run rounds as a whole one.
        """
        if t not in self._block:
            i = self._batch_of(t)
            first, end = self._starts[i : i + 2].tolist()
            size = max(1, TOGETHER // self._batch(i)[0][:, 0].numel())
            start = t - (t - first) % size
            self._block = range(start, min(start + size, end))
        return self._block

    def forget(self, *, before: int) -> None:
        for i in [i for i in self._known if self._starts[i + 1] <= before]:
            del self._known[i]

    def _places(self, frames: range) -> list[tuple[int, slice]]:
        """The mini-batches of consecutive frames, and their rows in each."""
        batches = range(self._batch_of(frames[0]), self._batch_of(frames[-1]) + 1)
        starts = self._starts.tolist()
        return [(i, slice(max(frames[0] - starts[i], 0), frames[-1] + 1 - starts[i])) for i in batches]

    def _batch_of(self, t: int) -> int:
        return int(np.searchsorted(self._starts, t, side="right")) - 1

    def _batch(self, i: int) -> tuple[Tensor, Tensor]:
        if i not in self._known:
            subject, plain = self._subject, self._plain
            inputs, targets = plain.batch(i)
            with subject.evaluating():
                found = [plain.outputs(inputs).log_softmax(dim=1)]
                if subject.members:
                    found += self._of_members(i)
            if self._others:
                found += self._of_networks(i, found[0])
            assert isinstance(targets, Tensor)
            self._known[i] = torch.stack(found).cpu(), targets.cpu()  # frames are scored there: one wait per mini-batch
        return self._known[i]

    def _of_networks(self, i: int, own: Tensor) -> list[Tensor]:
        """The mean of all networks, and one of them per frame: frame t is that of network t mod n, the subject 0."""
        logs = [own]
        for other in self._others:
            with other.evaluating():
                logs.append(other.outputs(other.batch(i)[0]).log_softmax(dim=1))
        every, rows = torch.stack(logs), torch.arange(len(own), device=own.device)
        return [every.logsumexp(dim=0) - math.log(len(logs)), every[(int(self._starts[i]) + rows) % len(logs), rows]]

    def _of_members(self, i: int) -> list[Tensor]:
        """The mean of all members, and one of them alone: its masks differ from frame to frame."""
        subject = self._subject
        inputs, _ = subject.batch(i)
        logs = []
        for member in range(subject.members):
            with subject.member(member):
                logs.append(subject.outputs(inputs).log_softmax(dim=1))
        return [torch.stack(logs).logsumexp(dim=0) - math.log(len(logs)), logs[0]]


DRAWS = 1000  # of the bootstrap
TOGETHER = 1 << 14  # log probabilities of frames that are smoothed and scored at a time
TERMS = calibration.COLUMNS
# Per frame: a number that is NaN where it is undefined -> the summary that is its mean over frames.
PER_FRAME = {
    "frame_nll": "", "frame_accuracy": "", "frame_consistency": "consistency",
    "frame_consistency_nll": "consistency_nll", "boundary_nll_frame": "boundary_nll",
    "boundary_accuracy_frame": "boundary_accuracy", "interior_nll_frame": "interior_nll",
    "interior_accuracy_frame": "interior_accuracy",
}  # fmt: skip
SCORES = (*calibration.METRICS, "mean_iou", *filter(None, PER_FRAME.values()))
DENSE = ("mean_iou", "boundary_nll", "boundary_accuracy", "interior_nll", "interior_accuracy")  # of masks only


def frame_scores(
    log_probabilities: Tensor, targets: Tensor, *, before: Tensor, boundary: Tensor | None
) -> dict[str, np.ndarray]:
    """What is stored of every prediction of a frame, float64.

    Log probabilities are (n, C) or (n, C, H, W), targets (n,) or (n, H, W); `before` are those of the frame before, NaN
    where there is none, `boundary` (n, H, W) marks the pixels near a boundary between classes. Scores are means over
    labelled pixels, consistencies over all pixels.
    """
    count = len(targets)
    logs, classes = log_probabilities.movedim(1, -1).flatten(0, -2), targets.flatten()
    labelled = classes >= 0
    sample = torch.arange(count).repeat_interleave(len(classes) // count)[labelled].numpy()
    rows = score_rows(logs[labelled], classes[labelled])
    scores = calibration.mean_scores(calibration.SampleScores(*rows.cpu().numpy()), sample, count)
    found: dict[str, Any] = {
        "terms": calibration.sums(scores),
        "frame_nll": scores.nll,
        "frame_accuracy": scores.correct,
    }
    found["frame_consistency"], found["frame_consistency_nll"] = _consistency(log_probabilities, before)
    if boundary is not None:
        pairs = zip(log_probabilities, targets, strict=True)
        each = [overlaps(log.flatten(1).T, own.flatten()) for log, own in pairs]
        found["intersection"], found["union"] = torch.stack(each, dim=1)
        near = boundary.flatten()[labelled]
        for part, inside in (("boundary", near), ("interior", ~near)):
            means = [rows[:2, inside & torch.from_numpy(sample == i)].mean(dim=1) for i in range(count)]
            found[f"{part}_nll_frame"], found[f"{part}_accuracy_frame"] = torch.stack(means, dim=1)
    return {name: np.asarray(value) for name, value in found.items()}


def _consistency(log_probabilities: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Share of predictions equal to those of the frame before, and the cross-entropy of both; NaN where there is none.

    Of several predictions (n, C, ...), (n,) each.
    """
    p = log_probabilities.exp()
    same = (log_probabilities.argmax(dim=1) == before.argmax(dim=1)).double()
    surprise = -torch.where(p > 0, p * before, 0.0).double().sum(dim=1)
    share, mean = (of.reshape(len(before), -1).mean(dim=1) for of in (same, surprise))
    return torch.where(before.reshape(len(before), -1)[:, 0].isnan(), torch.nan, share), mean


def near_boundary(targets: Tensor, distance: int) -> Tensor:
    """Pixels (H, W) within `distance` rows and columns of a pixel of another class; those without a label never are.

    A boundary to pixels without a label is none.
    """
    size, classes = 2 * distance + 1, targets.float()[None, None]
    missing = classes < 0
    largest = F.max_pool2d(classes, size, 1, distance)
    smallest = -F.max_pool2d(-classes.masked_fill(missing, torch.inf), size, 1, distance)
    return ((largest != smallest) & ~missing)[0, 0]


def summaries(data: Mapping[str, np.ndarray], blocks: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Scores over frames with 95 % intervals, and their change by smoothing, paired over frames.

    Arrays of `data` are those of `frame_scores`, (frame, method, ...), NaN where a frame is not finished, and the `tau`
    of every method. The change of a smoothed one, which takes one pass per frame, is from the last one before it with
    tau = 0, which takes all. Neighbouring frames are dependent, so that whole blocks of frames are resampled; `blocks`
    is the block of every frame. Intervals are those of `calibration.bootstrap`, of so many blocks.

    Returns:
        (method,) arrays `NAME`, `NAME_low`, `NAME_high`, `NAME_change`, `NAME_change_low`, `NAME_change_high`.
    """
    every, dense = _rows(data), "intersection" in data
    found: dict[str, list[float]] = defaultdict(list)
    plain: Any = None
    for i, tau in enumerate(data["tau"]):
        rows = np.zeros((blocks.max() + 1, every.shape[-1]))
        np.add.at(rows, blocks, every[:, i])
        one = calibration.Resampled.of(rows, DRAWS, seed, partial(_scores, dense=dense))
        plain = plain if tau else one
        for name, value in one.value.items():
            own, (shift, change) = one.interval(name), one.minus(plain, name)
            numbers: tuple[Any, ...] = (value, own.low, own.high, shift, change.low, change.high)
            for key, number in zip(suffixed(name), numbers, strict=True):
                found[key].append(float(number))
    return {key: np.array(numbers) for key, numbers in found.items()}


def suffixed(name: str) -> list[str]:
    """The names of the stored summaries of a score."""
    return [name, f"{name}_low", f"{name}_high", f"{name}_change", f"{name}_change_low", f"{name}_change_high"]


def _rows(data: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a frame adds to the sums, (frame, method, K).

    Terms of the calibration metrics, then per name of `PER_FRAME` the value and whether it is known, then pixels per
    class.
    """
    columns = [data["terms"]]
    for name in PER_FRAME:
        value = data[name] if name in data else np.full(data["terms"].shape[:2], np.nan)
        columns += [value[..., None], np.isfinite(value)[..., None]]
    columns += [data[name] for name in ("intersection", "union") if name in data]
    rows: np.ndarray = np.nan_to_num(np.concatenate(columns, axis=-1), posinf=np.inf)
    return rows


def _scores(total: np.ndarray, dense: bool) -> dict[str, np.ndarray]:
    """Every score of summed rows (..., K)."""
    found = dict(calibration.metrics(total[..., :TERMS]))
    place = TERMS
    with np.errstate(invalid="ignore", divide="ignore"):
        for name in PER_FRAME.values():
            if name and (dense or name not in DENSE):
                found[name] = total[..., place] / total[..., place + 1]
            place += 2
    if dense:
        found["mean_iou"] = calibration.mean_iou(np.stack(np.split(total[..., place:], 2, axis=-1), axis=-2))
    return found

"""Log probabilities of the frames of a stream, and scores of every frame as terms that add up, with their summary."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.predictions.member_networks import member_networks
from landscape.predictions.scores import overlaps, score_rows
from landscape.statistics.calibration import (
    COLUMNS,
    METRICS,
    SHARES,
    SampleScores,
    mean_iou,
    mean_scores,
    metrics,
    resampled_sums,
    sums,
)
from landscape.statistics.intervals import percentile_interval, share_interval
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights


@once_per_weights
def networks_of(subject: Subject, others: tuple[str, ...]) -> list[Subject]:
    """Other checkpoints on the frames of a subject.

    Raises:
        FileNotFoundError, ValueError: a checkpoint cannot be read, or is of other data.
    """
    return [network.load(subject) for network in member_networks(subject, others, "", 0)[1:]] if others else []


class FrameProbabilities:
    """Log probabilities of every frame, (prediction, C, ...), from one pass per mini-batch and member or network."""

    def __init__(self, subject: Subject, others: Sequence[Subject] = ()) -> None:
        self._subject, self._plain, self._others = subject, as_is(subject), others
        sizes = [subject.samples(i) for i in range(len(subject.batches))]
        self._starts = np.cumsum([0, *sizes])
        self._known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # mini-batch -> log probabilities (prediction, N, ...), targets

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, t: int) -> Tensor:
        i = self._batch_of(t)
        return self._batch(i)[0][:, t - self._starts[i]]

    def target(self, t: int) -> Tensor:
        """Target of a frame, () or (H, W)."""
        i = self._batch_of(t)
        return self._batch(i)[1][t - self._starts[i]]

    def forget(self, *, before: int) -> None:
        """Drop the mini-batches that end before a frame."""
        for i in [i for i in self._known if self._starts[i + 1] <= before]:
            del self._known[i]

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
            if logs[-1].shape != own.shape:
                raise ValueError(
                    f"{other.label} predicts {logs[-1].shape[1]} classes and {self._subject.label} {own.shape[1]}, "
                    "expected networks of the same classes; leave one of them out of --members"
                )
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
TERMS = COLUMNS
# Per frame: a number that is NaN where it is undefined -> the summary that is its mean over frames.
PER_FRAME = {
    "frame_nll": "",
    "frame_accuracy": "",
    "frame_consistency": "consistency",
    "frame_consistency_nll": "consistency_nll",
    "boundary_nll_frame": "boundary_nll",
    "boundary_accuracy_frame": "boundary_accuracy",
    "interior_nll_frame": "interior_nll",
    "interior_accuracy_frame": "interior_accuracy",
}
SCORES = (*METRICS, "mean_iou", *filter(None, PER_FRAME.values()))
DENSE = ("mean_iou", "boundary_nll", "boundary_accuracy", "interior_nll", "interior_accuracy")  # of masks only


def frame_scores(
    log_probabilities: Tensor, targets: Tensor, *, before: Tensor | None, boundary: Tensor | None
) -> dict[str, np.ndarray]:
    """What is stored of a frame, float64.

    Log probabilities are (C,) or (C, H, W), targets () or (H, W); `before` are those of the frame before, `boundary`
    (H, W) marks the pixels near a boundary between classes. Scores are means over labelled pixels, consistencies over
    all pixels.
    """
    logs, classes = log_probabilities.flatten(1).T if targets.dim() else log_probabilities[None], targets.flatten()
    labelled = classes >= 0
    rows = score_rows(logs[labelled], classes[labelled])
    scores = mean_scores(SampleScores(*rows.cpu().numpy()), np.zeros(rows.shape[1], dtype=int), 1)
    found: dict[str, Any] = {"terms": sums(scores)[0], "frame_nll": scores.nll[0], "frame_accuracy": scores.correct[0]}
    found["frame_consistency"] = found["frame_consistency_nll"] = np.nan
    if before is not None:
        same = log_probabilities.argmax(dim=0) == before.argmax(dim=0)
        p = log_probabilities.exp()
        surprise = -torch.where(p > 0, p * before, 0.0).double().sum(dim=0)
        found |= {"frame_consistency": same.double().mean(), "frame_consistency_nll": surprise.mean()}
    if boundary is not None:
        found["intersection"], found["union"] = overlaps(logs, classes)
        for part, inside in (("boundary", boundary), ("interior", ~boundary)):
            means = rows[:2, inside.flatten()[labelled]].mean(dim=1)
            found[f"{part}_nll_frame"], found[f"{part}_accuracy_frame"] = means
    return {name: np.asarray(value) for name, value in found.items()}


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
    """Scores over frames with 95 % intervals, and their change against no smoothing, paired over frames.

    Arrays of `data` are those of `frame_scores`, (frame, prediction, tau, ...), NaN where a frame is not finished;
    tau = 0 is the first. Neighbouring frames are dependent, so that whole blocks of frames are resampled; `blocks` is
    the block of every frame. The interval of the calibration error is reflected at its estimate, because that of a
    resample is biased upwards once more; shares have Wilson's, of so many blocks.

    Returns:
        (prediction, tau) arrays `NAME`, `NAME_low`, `NAME_high`, `NAME_change`, `NAME_change_low`, `NAME_change_high`.
    """
    every, dense = _rows(data), "intersection" in data
    _, predictions, taus, columns = every.shape
    found: dict[str, np.ndarray] = {}
    for i in range(predictions):
        plain: tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None = None
        for j in range(taus):
            rows = np.zeros((blocks.max() + 1, columns))
            np.add.at(rows, blocks, every[:, i, j])
            value, drawn = _scores(rows.sum(axis=0), dense), _scores(resampled_sums(rows, DRAWS, seed), dense)
            plain = plain or (value, drawn)
            for name in value:
                change = value[name] - plain[0][name], drawn[name] - plain[1][name]
                own = _interval(value[name], drawn[name], reflected=name == "ece")
                if name in SHARES:
                    low, high = share_interval(own[0], drawn[name].std(ddof=1), len(rows))
                    own = own[0], float(low), float(high)
                numbers = *own, *_interval(*change)
                for key, number in zip(suffixed(name), numbers, strict=True):
                    found.setdefault(key, np.full((predictions, taus), np.nan))[i, j] = number
    return found


def suffixed(name: str) -> list[str]:
    """The names of the stored summaries of a score."""
    return [name, f"{name}_low", f"{name}_high", f"{name}_change", f"{name}_change_low", f"{name}_change_high"]


def _rows(data: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a frame adds to the sums, (frame, prediction, tau, K).

    Terms of the calibration metrics, then per name of `PER_FRAME` the value and whether it is known, then pixels per
    class.
    """
    columns = [data["terms"]]
    for name in PER_FRAME:
        value = data[name] if name in data else np.full(data["terms"].shape[:3], np.nan)
        columns += [value[..., None], np.isfinite(value)[..., None]]
    columns += [data[name] for name in ("intersection", "union") if name in data]
    rows: np.ndarray = np.nan_to_num(np.concatenate(columns, axis=-1), posinf=np.inf)
    return rows


def _scores(total: np.ndarray, dense: bool) -> dict[str, np.ndarray]:
    """Every score of summed rows (..., K)."""
    found = dict(metrics(total[..., :TERMS]))
    place = TERMS
    with np.errstate(invalid="ignore", divide="ignore"):
        for name in PER_FRAME.values():
            if name and (dense or name not in DENSE):
                found[name] = total[..., place] / total[..., place + 1]
            place += 2
    if dense:
        found["mean_iou"] = mean_iou(np.stack(np.split(total[..., place:], 2, axis=-1), axis=-2))
    return found


def _interval(value: np.ndarray, drawn: np.ndarray, *, reflected: bool = False) -> tuple[float, float, float]:
    usable, own = drawn[np.isfinite(drawn)], float(value)
    if not len(usable):
        return own, np.nan, np.nan
    low, high = percentile_interval(usable)
    return (own, 2 * own - high, 2 * own - low) if reflected else (own, low, high)

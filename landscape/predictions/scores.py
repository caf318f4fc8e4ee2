"""Logits of a classifier on its mini-batches, and scores of its probabilities, sample by sample."""

import numpy as np
import torch
from torch import Tensor

from landscape.data.structure import logits_in
from landscape.options import OptionError
from landscape.probe import Quantity
from landscape.statistics.calibration import SampleScores, mean_scores
from landscape.subject.loading.sanity_check import why_not_finite
from landscape.subject.losses import bce, cross_entropy
from landscape.subject.subject import Subject


def refuse_other_than_classifier(subject: Subject, what: str) -> None:
    """Reject a subject whose outputs are not scored as the probabilities of classes.

    These are cross-entropy on one class per sample or per pixel, and the binary cross-entropy, whose every label counts
    as a sample of two classes.

    Raises:
        ValueError, OptionError: naming what was got and what `what` is measured on.
    """
    if subject.losses not in (cross_entropy, bce):
        raise OptionError(
            f"{what} scores the probabilities of a classifier, got --loss {subject.traits.name or 'of your own'}; "
            "it takes cross-entropy (nll) and bce (bce-probabilities)"
        )
    targets = subject.batch(0)[1]
    if subject.losses is bce or subject.dense:
        return
    if not isinstance(targets, Tensor) or targets.dim() != (2 if targets.is_floating_point() else 1):
        got = f"{tuple(targets.shape)} {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"{what} scores the probabilities of a classifier, got targets {got}, expected classes (N,) or soft "
            "targets (N, classes); measure it on labelled images"
        )


def class_targets(subject: Subject, i: int) -> Tensor:
    """Targets of mini-batch i as classes (N,) or shares of them (N, classes).

    Of several labels per sample, and of masks, there is an axis of these rows after the first one; pixels without a
    label have a negative class.
    """
    targets = subject.batch(i)[1]
    assert isinstance(targets, Tensor)
    if subject.losses is bce:
        labels = targets.double().flatten(1) if targets[0].numel() > 1 else targets.double().flatten()
        return labels.long() if bool(((labels == 0) | (labels == 1)).all()) else torch.stack([1 - labels, labels], -1)
    return targets.flatten(1) if subject.dense else targets


def logits_and_targets(subject: Subject, i: int) -> tuple[Tensor, Tensor]:
    """Logits (N, C) and `class_targets` of mini-batch i; of a stochastic subject with members, its log probabilities.

    Float64, of masks in the precision of the network. Of several labels per sample, and of masks, (N, rows, C). A label
    of a binary cross-entropy is two classes with the logits 0 and z.

    Raises:
        ValueError: the model returns something else, or a number that is not finite (-inf is the log of 0).
    """
    targets = class_targets(subject, i)
    with subject.evaluating():
        outputs = logits_in(subject.outputs(subject.batch(i)[0])).detach()
    got, logits = tuple(outputs.shape), outputs if subject.dense else outputs.double()
    rows = targets.shape[:-1] if targets.is_floating_point() else targets.shape
    if subject.losses is bce and logits.numel() == rows.numel():
        logits = torch.stack([torch.zeros_like(logits), logits], dim=-1).reshape(*rows, 2)
    elif subject.dense:
        logits = logits.movedim(1, -1).flatten(1, -2)
    if logits.shape[:-1] != rows:
        raise ValueError(f"{subject.label} returns {got} for {len(targets)} samples, expected logits (N, classes)")
    if not logits.amax(dim=-1).isfinite().all():
        raise ValueError(
            f"{subject.label} returns logits that are not finite for a sample of mini-batch {i}, so that its "
            f"probabilities are undefined; {why_not_finite(subject)}"
        )
    return logits, targets


def padded(values: np.ndarray, length: int, axis: int = 0) -> np.ndarray:
    """Values followed by NaN along an axis, `length` in all: a mini-batch may have fewer samples than the largest."""
    widths = [(0, length - size if k == axis else 0) for k, size in enumerate(values.shape)]
    return np.pad(values, widths, constant_values=np.nan)


PART = Quantity("wrong ones below 0.9, then by bin of confidence their number, confidence and right ones")
AT_ONCE = 1 << 22  # logits that are scored at a time


def sample_scores(log_probabilities: Tensor, targets: Tensor) -> SampleScores:
    """Scores of log probabilities (N, C) for the classes (N,); logits are normalised in double precision.

    Shares of the classes (N, C) are targets too. A true class of probability 0 has an infinite `nll`. Of samples of
    several rows, labels or pixels (N, rows, C), the means over those with a label.

    Raises:
        ValueError: the shapes do not fit.
    """
    there = labelled(targets) if log_probabilities.dim() == 3 else None
    if there is None:
        return SampleScores(*score_rows(log_probabilities, targets).cpu().numpy())
    rows = SampleScores(*score_rows(log_probabilities[there], targets[there]).cpu().numpy())
    return mean_scores(rows, there.nonzero()[:, 0].cpu().numpy(), len(targets))


def overlaps(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Pixels of every class where it is predicted and true, and either, (..., 2, C): of (..., rows, C), (..., rows)."""
    there, predicted, targets = targets >= 0, log_probabilities.argmax(dim=-1), targets.clamp(min=0).long()
    zeros = log_probabilities.new_zeros((*targets.shape[:-1], log_probabilities.shape[-1]), dtype=torch.float64)
    own, other, hits = (
        zeros.scatter_add(-1, of, counted.double())  # whole numbers: exact in any order
        for of, counted in ((predicted, there), (targets, there), (targets, there & (predicted == targets)))
    )
    return torch.stack([hits, own + other - hits], dim=-2)


def labelled(targets: Tensor) -> Tensor | None:
    """Which rows of samples of several rows have a label, (N, rows); None where a sample is one row.

    Targets are classes, (N,) or (N, rows) with negative ones where there is no label, or shares, with one axis more.
    """
    if targets.is_floating_point():
        return torch.ones_like(targets[..., 0], dtype=torch.bool) if targets.dim() == 3 else None
    return targets >= 0 if targets.dim() == 2 else None


def sample_means(values: Tensor, targets: Tensor) -> Tensor:
    """Means of values (..., N, rows) over the labelled rows of every sample; values (..., N) of one row as they are."""
    there = labelled(targets)
    return values if there is None else torch.where(there, values, 0.0).sum(dim=-1) / there.sum(dim=-1)


def score_rows(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """`sample_scores` as one tensor on the device, (5, N) float64, in the order of the fields of `SampleScores`."""
    soft = targets.is_floating_point()
    if log_probabilities.dim() != 2 or targets.shape != log_probabilities.shape[: 2 if soft else 1]:
        raise ValueError(
            f"got targets {tuple(targets.shape)} {targets.dtype} for logits {tuple(log_probabilities.shape)}, expected "
            "classes (N,) or soft targets (N, classes); score a classifier on labelled data"
        )
    size = max(1, AT_ONCE // log_probabilities.shape[1])
    parts = zip(torch.split(log_probabilities, size), torch.split(targets, size), strict=True)
    return torch.cat([_scored(*part) for part in parts], dim=1)


def _scored(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    logarithms = log_probabilities.double().log_softmax(dim=1)
    probabilities = logarithms.exp()
    confidence, predicted = probabilities.max(dim=1)
    if not targets.is_floating_point():
        targets = targets.long()  # masks are stored in fewer bytes
        nll = -logarithms.gather(1, targets[:, None])[:, 0]
        shares = torch.nn.functional.one_hot(targets, logarithms.shape[1])
    else:
        shares = targets.double()
        nll = -torch.where(shares > 0, shares * logarithms, 0.0).sum(dim=1)
        targets = targets.argmax(dim=1)
    top5 = (logarithms.topk(min(5, logarithms.shape[1]), dim=1).indices == targets[:, None]).any(dim=1)
    brier = (probabilities - shares).square().sum(dim=1)
    return torch.stack([nll, (predicted == targets).double(), top5.double(), brier, confidence.clamp(max=1.0)])

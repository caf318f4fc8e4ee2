"""Logits of a classifier on its mini-batches, and what makes a subject one."""

import torch
from torch import Tensor

from landscape.options import OptionError
from landscape.subject.losses import bce, cross_entropy
from landscape.subject.outputs import logits_in
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
            "probabilities are undefined; use a checkpoint that has not diverged"
        )
    return logits, targets

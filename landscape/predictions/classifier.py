"""Logits of a classifier on its mini-batches, and what makes a subject one."""

from __future__ import annotations

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
            f"{what} scores the probabilities of a classifier, got --loss {subject.loss_name or 'of your own'}; "
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


def rows_per_sample(subject: Subject) -> int:
    """How many rows of `logits_and_targets` a sample has: its labels, or its pixels; 1 of a class per sample."""
    targets = subject.batch(0)[1]
    assert isinstance(targets, Tensor)
    return targets[0].numel() if subject.losses is bce or subject.dense else 1


def logits_and_targets(subject: Subject, i: int) -> tuple[Tensor, Tensor]:
    """Logits (N, C) float64 and targets of mini-batch i; of a stochastic subject with members, its log probabilities.

    Of a binary cross-entropy a row per label, of two classes with the logits 0 and z; of dense prediction one per
    pixel, in which pixels without a label have a negative target.

    Raises:
        ValueError: the model returns something else, or a number that is not finite (-inf is the log of 0).
    """
    inputs, targets = subject.batch(i)
    with subject.evaluating():
        outputs = logits_in(subject.outputs(inputs))
    assert isinstance(targets, Tensor)
    if subject.losses is bce and outputs.numel() == targets.numel():
        logits, targets = outputs.reshape(-1), targets.reshape(-1).double()
        outputs, targets = (
            torch.stack([torch.zeros_like(logits), logits], dim=1),
            torch.stack([1 - targets, targets], 1),
        )
        targets = targets.argmax(dim=1) if bool(((targets == 0) | (targets == 1)).all()) else targets
    elif subject.dense:
        outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
    if outputs.dim() != 2 or len(outputs) != len(targets):
        raise ValueError(
            f"{subject.label} returns {tuple(outputs.shape)} for {len(targets)} samples, expected logits (N, classes)"
        )
    logits = outputs.detach().double()
    if not logits.amax(dim=1).isfinite().all():
        raise ValueError(
            f"{subject.label} returns logits that are not finite for a sample of mini-batch {i}, so that its "
            "probabilities are undefined; use a checkpoint that has not diverged"
        )
    return logits, targets

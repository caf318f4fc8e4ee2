"""Logits of a classifier on its mini-batches, and what makes a subject one."""

from __future__ import annotations

from torch import Tensor

from landscape.options import OptionError
from landscape.subject.losses import cross_entropy
from landscape.subject.subject import Subject


def refuse_other_than_classifier(subject: Subject, what: str) -> None:
    """Reject a subject whose outputs are not scored by cross-entropy on one class per sample.

    Raises:
        ValueError, OptionError: naming what was got and what `what` is measured on.
    """
    if subject.losses is not cross_entropy:
        raise OptionError(
            f"{what} scores the probabilities of a classifier, got --loss {subject.loss_name or 'of your own'}; "
            "leave --loss out, which is cross-entropy"
        )
    targets = subject.batch(0)[1]
    if not isinstance(targets, Tensor) or targets.dim() != (2 if targets.is_floating_point() else 1):
        got = f"{tuple(targets.shape)} {targets.dtype}" if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(
            f"{what} scores the probabilities of a classifier, got targets {got}, expected classes (N,) or soft "
            "targets (N, classes); measure it on labelled images"
        )


def logits_and_targets(subject: Subject, i: int) -> tuple[Tensor, Tensor]:
    """Logits (N, C) float64 and targets of mini-batch i; of a stochastic subject with members, its log probabilities.

    Raises:
        ValueError: the model returns something else, or a number that is not finite (-inf is the log of 0).
    """
    inputs, targets = subject.batch(i)
    with subject.evaluating():
        outputs = subject.outputs(inputs)
    assert isinstance(targets, Tensor)
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(targets):
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"{subject.label} returns {got} for {len(targets)} samples, expected logits (N, classes)")
    logits: Tensor = outputs.detach().double()
    if not logits.amax(dim=1).isfinite().all():
        raise ValueError(
            f"{subject.label} returns logits that are not finite for a sample of mini-batch {i}, so that its "
            "probabilities are undefined; use a checkpoint that has not diverged"
        )
    return logits, targets

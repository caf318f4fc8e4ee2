"""Networks that end in a softmax or a sigmoid: take their probabilities as such, and refuse them as logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from landscape.data.batch_layout import Forward
from landscape.data.structure import Nested
from landscape.subject.losses import Losses, bce, cross_entropy
from landscape.subject.outputs import logits_in, logits_or_none
from landscape.subject.subject import Subject

ROUNDING = 1e-3  # of the sum of a row of probabilities, which a network in half precision gives


@dataclass(frozen=True)
class LogitsOf:
    """A forward pass that gives the logits behind the probabilities of a network."""

    base: Forward
    of: str  # `softmax` or `sigmoid`

    def __call__(self, model: Callable[..., Any], inputs: Nested) -> Tensor:
        shares = logits_in(self.base(model, inputs))
        least = torch.finfo(shares.dtype).tiny
        if self.of == "softmax":
            return shares.clamp_min(least).log()
        return shares.clamp_min(least).log() - (1 - shares).clamp_min(torch.finfo(shares.dtype).eps / 2).log()


ENDS_IN: Mapping[str, str] = {"nll": "softmax", "bce-probabilities": "sigmoid"}  # by the name of the loss


def taken_as_probabilities(subject: Subject) -> Subject:
    """The subject with logits in place of probabilities, where its loss says that the network gives these."""
    end = ENDS_IN.get(subject.traits.name)
    return replace(subject, forward=LogitsOf(subject.forward, end)) if end else subject


def refuse_probabilities(subject: Subject, outputs: Any) -> None:
    """Reject outputs of all samples that lie in 0 to 1, with rows of sum 1 for cross-entropy: they are no logits.

    Samples are looked at until one of them is none; `outputs` are those of a few, so that this ends at once for
    logits. `--outputs logits` skips it.

    Raises:
        ValueError: all outputs are probabilities.
    """
    names: dict[Losses, tuple[str, str]] = {cross_entropy: ("softmax", "nll"), bce: ("sigmoid", "bce-probabilities")}
    known = names.get(subject.losses)
    if (
        known is None
        or subject.traits.name in ENDS_IN
        or (subject.spec is not None and subject.spec.outputs == "logits")
    ):
        return
    if not _are_probabilities(subject, outputs):
        return
    for inputs, _ in subject.each_batch():
        if not _are_probabilities(subject, subject.outputs(inputs)):
            return
    end, loss = known
    sums = " with rows of sum 1" if end == "softmax" else ""
    raise ValueError(
        f"all outputs of the model on all {len(subject)} samples lie in 0 to 1{sums}: it ends in a {end}, and its "
        f"probabilities would be scored as if they were logits; give --loss {loss} for probabilities, or --outputs "
        f"logits if these are logits"
    )


def _are_probabilities(subject: Subject, outputs: Any) -> bool:
    shares = logits_or_none(outputs)
    if shares is None or not shares.is_floating_point() or not bool(((shares >= 0) & (shares <= 1)).all()):
        return False
    if subject.losses is bce:  # a head that is still 0 gives logits of 0
        return bool((shares > 0).any()) and bool((shares < 1).any())
    if shares.dim() < 2:
        return False
    classes = 1 if shares.dim() in (2, 4) else shares.dim() - 1
    return shares.shape[classes] > 1 and bool(((shares.double().sum(dim=classes) - 1).abs() < ROUNDING).all())

"""The network with normalised logits, which all multiples of its logits share (arXiv 2302.07011)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from landscape.data.batch_layout import Forward
from landscape.data.structure import Nested
from landscape.options import OptionError
from landscape.subject.outputs import logits_in
from landscape.subject.subject import Subject

LEAST = 1e-10  # norm below which logits are not divided by it


@dataclass(frozen=True)
class NormalisedLogits:
    """A forward pass whose logits (N, C) have mean 0 and norm 1."""

    base: Forward

    def __call__(self, model: Callable[..., Any], inputs: Nested) -> Tensor:
        return normalised(logits_in(self.base(model, inputs)))


def normalised(logits: Tensor) -> Tensor:
    """Logits (N, C) minus the mean of each sample, divided by their norm, as in the paper's code."""
    centred = logits - logits.mean(dim=-1, keepdim=True)
    unit: Tensor = centred / centred.norm(dim=-1, keepdim=True).clamp_min(LEAST)
    return unit


def with_normalised_logits(subject: Subject) -> Subject:
    """The subject with normalised logits.

    Raises:
        OptionError: its predictions are averages over dropout masks.
        ValueError: it gives one output per sample, which has no direction.
    """
    if subject.members:
        raise OptionError("--normalize-logits is for one network, --mc-dropout averages several; give one of them")
    with subject.evaluating():
        logits = logits_in(subject.outputs(subject.example()[0]))
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"--normalize-logits needs logits (N, classes) of at least 2 classes, got outputs {tuple(logits.shape)}; "
            "leave it out"
        )
    return replace(subject, forward=NormalisedLogits(subject.forward))

"""The linear layer whose outputs are the logits, and the network with normalised logits (arXiv 2302.07011)."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from landscape.data.structure import Forward, Nested, logits_in
from landscape.options import OptionError
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
        ValueError: it gives one output per sample, which has no direction, or a loss takes more than the logits.
    """
    if subject.members:
        raise OptionError("--normalize-logits is for one network, --mc-dropout averages several; give one of them")
    with subject.evaluating():
        outputs = subject.outputs(subject.example()[0])
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"--normalize-logits needs a loss of the logits alone, got one of the {type(outputs).__name__} that the "
            "model returns; leave it out"
        )
    logits = logits_in(outputs)
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"--normalize-logits needs logits (N, classes) of at least 2 classes, got outputs {tuple(logits.shape)}; "
            "leave it out"
        )
    return replace(subject, forward=NormalisedLogits(subject.forward))


def linear_head(subject: Subject, inputs: Nested) -> tuple[nn.Linear, Tensor, Tensor] | None:
    """That layer with what it was given, (N, ..., features), and its logits (N, ..., classes); None if there is none.

    A layer that runs several times in a forward pass is none, nor is one of several outputs that a loss takes together.
    """
    found: list[tuple[nn.Linear, Any, Tensor]] = []

    def note(module: nn.Module, given: Any, returned: Any) -> None:
        assert isinstance(module, nn.Linear)
        found.append((module, given, returned))

    with contextlib.ExitStack() as hooks, subject.evaluating():
        for module in subject.model.modules():
            if type(module) is nn.Linear:
                hooks.enter_context(module.register_forward_hook(note))
        logits = subject.outputs(inputs)
    calls = [module for module, *_ in found]
    head, given = next(((module, given) for module, given, returned in found if returned is logits), (None, ()))
    if head is None or calls.count(head) != 1 or not given:
        return None
    return head, given[0], logits

"""The linear layer whose outputs, as they are, are the logits of a model."""

import contextlib
from typing import Any

from torch import Tensor, nn

from landscape.data.structure import Nested
from landscape.subject.outputs import logits_or_none
from landscape.subject.subject import Subject


def linear_head(subject: Subject, inputs: Nested) -> tuple[nn.Linear, Tensor, Tensor] | None:
    """That layer with what it was given, (N, ..., features), and its logits (N, ..., classes); None if there is none.

    A layer that runs several times in a forward pass is none.
    """
    found: list[tuple[nn.Linear, Any, Tensor]] = []

    def note(module: nn.Module, given: Any, returned: Any) -> None:
        assert isinstance(module, nn.Linear)
        found.append((module, given, returned))

    with contextlib.ExitStack() as hooks, subject.evaluating():
        for module in subject.model.modules():
            if type(module) is nn.Linear:
                hooks.enter_context(module.register_forward_hook(note))
        logits = logits_or_none(subject.outputs(inputs))
    calls = [module for module, *_ in found]
    head, given = next(((module, given) for module, given, returned in found if returned is logits), (None, ()))
    if head is None or logits is None or calls.count(head) != 1 or not given:
        return None
    return head, given[0], logits

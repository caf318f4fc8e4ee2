"""The model that a monitor follows, and its mini-batches, refused before the training where they do not fit."""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from landscape.data.structure import common_length
from landscape.options import OptionError
from landscape.subject.loading.load import Objects, load_spec, unwrapped
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.weight_space.optimizer_step import loss_on


def subject_of(module: nn.Module, loss: str | Callable[..., Any], batch: Any, label: str, other: Any) -> Subject:
    """The model on its one mini-batch, and on another one where that is given."""
    if batch is None:
        raise OptionError("Monitor needs batch=, one mini-batch as the training's loader gives it")
    rows = common_length(batch) or 1
    named = loss if isinstance(loss, str) else ""
    spec = Spec(batch_size=rows, samples="all", loss=named)
    made = None if isinstance(loss, str) else loss
    objects = Objects(module, [batch] if other is None else [batch, other], made, noting=False)
    subject = load_spec(spec, objects, label=label or type(module).__name__)
    _ = subject.parameters  # raises for complex ones
    return subject


def check_other(subject: Subject) -> None:
    """Refuse a second mini-batch that the loss does not take, before the training."""
    try:
        finite = len(subject.batches) < 2 or math.isfinite(loss_on(subject, 1))
    except Exception as error:  # whatever the caller's model and loss raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"other= cannot be measured with this model and loss ({reason}); give a mini-batch of the form and the "
            "classes of batch="
        ) from None
    if not finite:
        raise ValueError("the loss of other= is not a finite number; give another mini-batch")


def followed(model: nn.Module) -> nn.Module:
    """The module inside its wrappers, with parameters that can change."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"Monitor measures a module, got a {type(model).__name__}; give the model that is trained")
    module = unwrapped(model, divided=True)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"all parameters of the model ({type(module).__name__}) are frozen: there is nothing to follow"
        )
    return module

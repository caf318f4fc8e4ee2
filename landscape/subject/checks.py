"""Refusing a model that is another function at every pass: its surface would be noise."""

from __future__ import annotations

import torch
from torch import nn

from landscape.checkpoints import user_code
from landscape.subject.derived import once_per_weights
from landscape.subject.outputs import outputs_of
from landscape.subject.subject import Subject


def refuse_unsteady(subject: Subject) -> None:
    """Refuse layers in training mode, and a model that draws random numbers nevertheless; looked at once.

    Raises:
        ValueError: naming what was found and what to do.
    """
    refuse_training(subject.model)
    if _draws(subject):
        raise ValueError(
            f"the model ({type(subject.model).__name__}) draws random numbers in evaluation mode, expected the same "
            "loss at every pass; switch its dropout off (of our models: --model-arg mc_dropout=0)"
        )


@once_per_weights
def _draws(subject: Subject) -> bool:
    """Whether a pass leaves the generators changed and the outputs depend on them."""
    inputs = subject.batch(0)[0][:2]
    found = []
    with torch.inference_mode():
        for seed in (0, 1):
            with user_code.fixed_rng(seed):
                before = user_code.rng_states()
                found.append(outputs_of(subject.model, inputs))
                drawn = before != user_code.rng_states()
    return drawn and not torch.equal(*found)


def refuse_training(model: nn.Module) -> None:
    """Refuse layers whose outputs depend on chance or on the other samples, and which every pass would change."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, module in model.named_modules():
        if module.training and isinstance(module, kinds):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is in training mode, expected evaluation mode: "
                "call model.eval() before measuring"
            )

"""Refusing a model that is another function at every pass: its surface would be noise."""

from __future__ import annotations

import torch

from landscape import chance
from landscape.curvature import refuse_training
from landscape.subject import Subject, outputs_of


def refuse_unsteady(subject: Subject) -> None:
    """Refuse layers in training mode, and a model that draws random numbers nevertheless; looked at once.

    Raises:
        ValueError: naming what was found and what to do.
    """
    refuse_training(subject.model)
    if subject.once("draws", lambda: _draws(subject)):
        raise ValueError(
            f"the model ({type(subject.model).__name__}) draws random numbers in evaluation mode, expected the same "
            "loss at every pass; switch its dropout off (of our models: --model-arg mc_dropout=0)"
        )


def _draws(subject: Subject) -> bool:
    """Whether a pass leaves the generators changed and the outputs depend on them."""
    inputs = subject.batch(0)[0][:2]
    found = []
    with torch.inference_mode():
        for seed in (0, 1):
            with chance.fixed(seed):
                before = chance.states()
                found.append(outputs_of(subject.model, inputs))
                drawn = before != chance.states()
    return drawn and not torch.equal(*found)

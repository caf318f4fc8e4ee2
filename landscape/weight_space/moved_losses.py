"""Losses of mini-batches, and their gradients, at weights that are moved by a flat vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from landscape.curvature.vectors import flat, unflat
from landscape.subject.subject import Subject
from landscape.weight_space.weights_in_place import WeightsInPlace


class MovedLosses:
    """A context manager that moves some parameters of a subject's model; on exit they have their original bits."""

    def __init__(self, subject: Subject, parameters: Mapping[str, Tensor]) -> None:
        self.subject, self._parameters = subject, parameters
        self._weights = WeightsInPlace(subject, parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._weights.restore()

    @property
    def weights(self) -> Tensor:
        """The original weights, flat, (n,)."""
        return flat(self._weights.original.values())

    def move(self, change: Tensor) -> None:
        """Set the weights to the original ones plus a flat vector, (n,)."""
        pieces = unflat(change, list(self._parameters.values()))
        self._weights.translate((dict(zip(self._parameters, pieces, strict=True)), 1.0))

    def losses(self, i: int) -> Tensor:
        """The loss of every sample of mini-batch i at the present weights, (N,) float64."""
        return self.losses_and_right(i)[0]

    def losses_and_right(self, i: int) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every sample, (N,) float64 each; NaN where the loss defines no correctness."""
        inputs, targets = self.subject.batch(i)
        with self.subject.evaluating():
            losses, right = self.subject.losses_and_right(self.subject.outputs(inputs), targets)
        return losses.detach().double(), right.detach().double()

    def losses_and_gradient(self, i: int) -> tuple[Tensor, Tensor]:
        """The loss of every sample, (N,) float64, and the gradient of their mean, flat, (n,)."""
        inputs, targets = self.subject.batch(i)
        with torch.enable_grad():
            losses = self.subject.losses(self.subject.outputs(inputs), targets)
        parameters = list(self._parameters.values())
        gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
        return losses.detach().double(), flat(gradients)

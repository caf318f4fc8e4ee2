"""Losses of mini-batches, and their gradients, at weights that are moved by a flat vector."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from landscape.products.micro_batches import MicroBatching
from landscape.products.operator import part_of
from landscape.products.vectors import flat, unflat
from landscape.subject.subject import Subject
from landscape.weight_space.weights_in_place import WeightsInPlace


class MovedLosses:
    """A context manager that moves some parameters of a subject's model; on exit they have their original bits.

    Where a mini-batch does not fit into memory, its losses and their gradient are computed in micro-batches.
    """

    def __init__(
        self, subject: Subject, parameters: Mapping[str, Tensor], micro_batching: MicroBatching | None = None
    ) -> None:
        self.subject, self._parameters = subject, parameters
        self._micro_batching = micro_batching or MicroBatching()
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

        def work(part: slice) -> tuple[Tensor, Tensor]:
            inputs, targets = part_of(self.subject, i, part)
            with self.subject.evaluating():
                return self.subject.losses_and_right(self.subject.outputs(inputs), targets)

        losses, right = zip(*self._micro_batching.each(separable(self.subject, i), work), strict=True)
        return torch.cat(losses).detach().double(), torch.cat(right).detach().double()

    def losses_and_gradient(self, i: int) -> tuple[Tensor, Tensor]:
        """The loss of every sample, (N,) float64, and the gradient of their mean, flat, (n,)."""
        parameters = list(self._parameters.values())

        def work(part: slice) -> tuple[Tensor, Tensor]:
            inputs, targets = part_of(self.subject, i, part)
            with torch.enable_grad():
                losses = self.subject.losses(self.subject.outputs(inputs), targets)
            gradients = torch.autograd.grad(losses.mean(), parameters, allow_unused=True, materialize_grads=True)
            return losses.detach().double(), flat(gradients)

        found = self._micro_batching.each(separable(self.subject, i), work)
        if len(found) == 1:
            return found[0]
        losses = torch.cat([part for part, _ in found])
        return losses, torch.stack([gradient * (len(part) / len(losses)) for part, gradient in found]).sum(dim=0)


def separable(subject: Subject, i: int) -> int:
    """Into how many micro-batches mini-batch i can be split: its samples, 1 where they depend on each other."""
    return subject.samples(i) if subject.divisible and not subject.traits.coupled else 1

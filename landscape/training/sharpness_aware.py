"""Sharpness-aware minimisation (Foret et al. 2021, arXiv 2010.01412): the gradient at the worst weights nearby."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LEAST_NORM = 1e-12  # added to the norm of the gradient, which is 0 at a critical point


@contextmanager
def ascended(network: nn.Module, rho: float) -> Iterator[None]:
    """Within the block, the weights are w + rho g / ||g|| (section 2, p = 2), where g is the present gradient.

    After it they are w again, bit for bit, with the gradients that the block left: the update's second pass. All
    parameters with a gradient move, also biases and norms. g is that of the whole update: of all parts of an
    accumulated one and of all processes, whose gradients are summed by then. So the result does not depend on how an
    update is divided; the paper's takes one ascent direction per accelerator. Buffers, which are batch norm's
    statistics, are kept from the first pass. Memory: another copy of the weights.
    """
    weights: list[Tensor] = [parameter for parameter in network.parameters() if parameter.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    buffers = list(network.buffers())
    with torch.no_grad():
        before = [tensor.clone() for tensor in (*weights, *buffers)]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        steps = torch._foreach_mul(gradients, rho / (norm + LEAST_NORM))
        torch._foreach_add_(weights, list(steps))
    yield
    with torch.no_grad():
        torch._foreach_copy_([*weights, *buffers], before)

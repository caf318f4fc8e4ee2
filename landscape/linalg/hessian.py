"""Products of the loss Hessian with vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.linalg.vector import flat, unflat


@dataclass(frozen=True)
class HessianProduct:
    """v -> H v + shift v for one scalar function, by double backward through a kept graph (Pearlmutter 1994).

    The gradient graph is built once; every product is one more backward pass through it, about 2.2 to 2.7
    gradients. Nothing is written to `.grad`.

    Args:
        value: the function at the present weights.
        gradient: flat, (n,), without its graph.
        parameters: the tensors differentiated by.
        shift: added to the diagonal: the Hessian of shift * (1/2) ||w||^2.
    """

    value: float
    gradient: Tensor
    parameters: Sequence[Tensor]
    shift: float
    _graph: Sequence[Tensor]

    def __call__(self, vector: Tensor) -> Tensor:
        """H v, (n,)."""
        directions = unflat(vector, self.parameters)
        products = torch.autograd.grad(
            self._graph,
            self.parameters,
            grad_outputs=directions,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        product = flat(products)
        return product.add_(vector, alpha=self.shift) if self.shift else product


def hessian_product(
    function: Callable[[], Tensor], parameters: Sequence[Tensor], *, shift: float = 0.0
) -> HessianProduct:
    """Prepare Hessian products of a scalar function of the parameters, at a cost of one gradient.

    Raises:
        ValueError: an operation in the model has no second derivative; names it.
    """
    try:
        with differentiable_attention(), torch.enable_grad():
            value = function()
            graph = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        raise ValueError(f"the model cannot be differentiated twice ({str(error).splitlines()[0]})") from error
    # A parameter that enters linearly, or not at all, has a gradient without a graph: its products are zero.
    graph = tuple(g if g.requires_grad else g + 0 * p for g, p in zip(graph, parameters, strict=True))
    return HessianProduct(value.item(), flat(graph).detach(), parameters, shift, graph)


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention by plain matrix products: fused kernels have no second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

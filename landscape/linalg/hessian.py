"""Products of the loss Hessian with vectors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from landscape.linalg.vector import flat, unflat

_switches = threading.RLock()


@dataclass(frozen=True)
class HessianProduct:
    """v -> H v + shift v for one scalar function, by double backward through a kept graph (Pearlmutter 1994).

    The gradient graph is built once; every product is one more backward pass through it, about 2.2 to 2.7
    gradients. Nothing is written to `.grad`. A call raises ValueError where the model has no second derivative.

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
        with twice_differentiable():
            products = torch.autograd.grad(
                self._graph,
                self.parameters,
                grad_outputs=unflat(vector, self.parameters),
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
        ValueError: an operation in the model has no derivative; names it.
    """
    with differentiable_attention(), torch.enable_grad():
        value = function()
        with twice_differentiable():
            graph = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
        graph = linked(graph, parameters)
    refuse_severed(graph)
    return HessianProduct(value.item(), flat(graph).detach(), parameters, shift, graph)


def linked(gradients: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients that can all be differentiated: what enters linearly, or not at all, has one without a graph."""
    return tuple(g if g.requires_grad else g + 0 * p for g, p in zip(gradients, sources, strict=True))


def refuse_severed(graph: Sequence[Tensor]) -> None:
    """Refuse a gradient cut off from the weights: without this its products would be zero, and nothing would say so."""
    waiting = [g.grad_fn for g in graph]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if node.name().endswith("Error"):  # what torch puts there for a function marked once_differentiable
            raise ValueError("the model cannot be differentiated twice (one of its functions is once_differentiable)")
        following = {function for function, _ in node.next_functions} - seen
        seen |= following
        waiting += following


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Say what it means where torch has no derivative of a derivative; running out of memory is another matter."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"the model cannot be differentiated twice ({str(error).splitlines()[0]})") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch has a class for it on accelerators only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "allocate memory" in str(error) or "not enough memory" in str(error)


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention by plain matrix products: fused kernels have no second derivative.

    One thread at a time: the switches belong to the process, and whoever leaves would flip them for the others.
    """
    with _switches:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

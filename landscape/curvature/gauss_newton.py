"""Products of the two positive semi-definite stand-ins for the Hessian: the Gauss-Newton matrix and the Fisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.curvature.hessian_product import (
    differentiable_attention,
    explained,
    flat_shifted,
    require_second_derivative,
    with_graphs,
)
from landscape.curvature.vectors import unflat


@dataclass(frozen=True)
class GaussNewtonProduct:
    """v -> J' M J v + shift v, J the derivative of a few outputs by the weights and M a small symmetric matrix.

    J' u is one backward pass, linear in u, and J v the derivative of its inner product with v by u: two backward passes
    through kept graphs per product, without forward mode. A call raises ValueError where the model has no second
    derivative.
    """

    value: float  # of the loss at the present weights
    parameters: Sequence[Tensor]  # the tensors differentiated by
    shift: float  # added to the diagonal
    _outputs: Tensor
    _u: Tensor
    _transposed: Sequence[Tensor]  # J' u, with its graph
    _middle: Callable[[Tensor], Tensor]  # v -> M v

    def __call__(self, vector: Tensor) -> Tensor:
        """J' M J v + shift v, (n,)."""
        with explained():
            (forward,) = torch.autograd.grad(
                self._transposed, self._u, grad_outputs=unflat(vector, self.parameters), retain_graph=True
            )
            products = torch.autograd.grad(
                self._outputs,
                self.parameters,
                grad_outputs=self._middle(forward),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return flat_shifted(products, vector, self.shift)


def gauss_newton_product(
    outputs: Callable[[], Tensor],
    losses: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    *,
    shift: float = 0.0,
) -> GaussNewtonProduct:
    """The generalised Gauss-Newton matrix (Schraudolph 2002): M is the Hessian of the mean loss by the logits.

    For cross-entropy it is the Fisher matrix of the model's own distribution.

    Args:
        outputs: () -> logits (N, classes).
        losses: logits -> losses per sample (N,).
        parameters: by which to differentiate.
        shift: added to the diagonal.

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with differentiable_attention(), torch.enable_grad():
        logits = outputs()
    with torch.enable_grad():
        point = logits.detach().requires_grad_()
        loss = losses(point).mean()
        (slope,) = with_graphs(torch.autograd.grad(loss, point, create_graph=True), [point])

    def middle(vector: Tensor) -> Tensor:
        (curved,) = torch.autograd.grad(slope, point, grad_outputs=vector, retain_graph=True)
        return curved

    return _prepared(loss.item(), logits, middle, parameters, shift)


def fisher_product(
    losses: Callable[[], Tensor], parameters: Sequence[Tensor], *, shift: float = 0.0
) -> GaussNewtonProduct:
    """The EMPIRICAL Fisher, mean over samples of g g' with g the gradient of a sample's loss at its true target.

    With J the derivative of the losses per sample, M is 1/N. Not the Fisher matrix of the model's distribution, nor
    an approximation of the Hessian far from a good fit (Kunstner et al. 2019).

    Args:
        losses: () -> losses per sample (N,).
        parameters: by which to differentiate.
        shift: added to the diagonal.

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with differentiable_attention(), torch.enable_grad():
        outputs = losses()
    return _prepared(outputs.mean().item(), outputs, lambda vector: vector / len(outputs), parameters, shift)


def _prepared(
    value: float, outputs: Tensor, middle: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], shift: float
) -> GaussNewtonProduct:
    with torch.enable_grad(), explained():
        u = torch.zeros_like(outputs, requires_grad=True)
        transposed = torch.autograd.grad(
            outputs, parameters, grad_outputs=u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        # A parameter that is not used has no graph to u.
        transposed = tuple(t if t.requires_grad else t + 0 * u.sum() for t in transposed)
    require_second_derivative(transposed)
    return GaussNewtonProduct(value, parameters, shift, outputs, u, transposed, middle)

"""Products with the positive semi-definite alternatives to the Hessian: Gauss-Newton and the empirical Fisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from landscape.products.hessian_product import (
    Product,
    differentiable_attention,
    require_second_derivative,
    second_derivative_errors,
    with_graphs,
)
from landscape.products.vectors import unflat


def gauss_newton_product(
    outputs: Callable[[], Tensor],
    losses: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    *,
    shift: float = 0.0,
) -> Product:
    """The generalised Gauss-Newton matrix (Schraudolph 2002), J' M J with M the Hessian of the mean loss by the logits.

    For cross-entropy it is the Fisher matrix of the model's own distribution. `outputs` gives the logits (N, classes),
    `losses` the losses per sample (N,) of logits; `shift` is added to the diagonal.

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

    return _prepared(loss.detach(), logits, middle, parameters, shift)


def fisher_product(losses: Callable[[], Tensor], parameters: Sequence[Tensor], *, shift: float = 0.0) -> Product:
    """The EMPIRICAL Fisher, mean over samples of g g' with g the gradient of a sample's loss at its true target.

    With J the derivative of the losses per sample (N,), M is 1/N. Not the Fisher matrix of the model's distribution,
    nor an approximation of the Hessian far from a good fit (Kunstner et al. 2019).

    Raises:
        ValueError: an operation in the model has no derivative; names it.
    """
    with differentiable_attention(), torch.enable_grad():
        outputs = losses()
    return _prepared(outputs.detach().mean(), outputs, lambda vector: vector / len(outputs), parameters, shift)


def _prepared(
    value: Tensor, outputs: Tensor, middle: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], shift: float
) -> Product:
    """The product v -> J' M J v, J the derivative of a few outputs by the weights and M a small symmetric matrix.

    J' u is one backward pass, linear in u, and J v the derivative of its inner product with v by u: two backward passes
    through kept graphs per product, without forward mode.
    """
    with torch.enable_grad(), second_derivative_errors():
        u = torch.zeros_like(outputs, requires_grad=True)
        transposed = torch.autograd.grad(
            outputs, parameters, grad_outputs=u, create_graph=True, allow_unused=True, materialize_grads=True
        )
        # A parameter that is not used has no graph to u.
        transposed = tuple(t if t.requires_grad else t + 0 * u.sum() for t in transposed)
    require_second_derivative(transposed)

    def products(vector: Tensor) -> Sequence[Tensor]:
        with second_derivative_errors():
            (forward,) = torch.autograd.grad(transposed, u, grad_outputs=unflat(vector, parameters), retain_graph=True)
            return torch.autograd.grad(
                outputs, parameters, middle(forward), retain_graph=True, allow_unused=True, materialize_grads=True
            )

    return Product(value, shift, products)

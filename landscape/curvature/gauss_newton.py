"""Products of the two positive semi-definite stand-ins for the Hessian: the Gauss-Newton matrix and the Fisher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.curvature.hessian_product import differentiable_attention, linked, refuse_severed, twice_differentiable
from landscape.curvature.vectors import flat, unflat


@dataclass(frozen=True)
class GaussNewtonProduct:
    """v -> J' M J v + shift v, J the derivative of a few outputs by the weights and M a small symmetric matrix.

    J' u is one backward pass, linear in u, and J v the derivative of its inner product with v by u: two backward passes
    through kept graphs per product, without forward mode. A call raises ValueError where the model has no second
    derivative.

    Args:
        value: the loss at the present weights.
        parameters: the tensors differentiated by.
        shift: added to the diagonal.
    """

    value: float
    parameters: Sequence[Tensor]
    shift: float
    _outputs: Tensor
    _probe: Tensor
    _transposed: Sequence[Tensor]  # J' probe, with its graph
    _middle: Callable[[Tensor], Tensor]

    def __call__(self, vector: Tensor) -> Tensor:
        """J' M J v + shift v, (n,)."""
        with twice_differentiable():
            (forward,) = torch.autograd.grad(
                self._transposed, self._probe, grad_outputs=unflat(vector, self.parameters), retain_graph=True
            )
            products = torch.autograd.grad(
                self._outputs,
                self.parameters,
                grad_outputs=self._middle(forward),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        product = flat(products)
        return product.add_(vector, alpha=self.shift) if self.shift else product


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
        (slope,) = linked(torch.autograd.grad(loss, point, create_graph=True), [point])

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
        found = losses()
    return _prepared(found.mean().item(), found, lambda vector: vector / len(found), parameters, shift)


def _prepared(
    value: float, outputs: Tensor, middle: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], shift: float
) -> GaussNewtonProduct:
    with torch.enable_grad(), twice_differentiable():
        probe = torch.zeros_like(outputs, requires_grad=True)
        transposed = torch.autograd.grad(
            outputs, parameters, grad_outputs=probe, create_graph=True, allow_unused=True, materialize_grads=True
        )
        # A parameter that is not used has no graph to the probe.
        transposed = tuple(t if t.requires_grad else t + 0 * probe.sum() for t in transposed)
    refuse_severed(transposed)
    return GaussNewtonProduct(value, parameters, shift, outputs, probe, transposed, middle)

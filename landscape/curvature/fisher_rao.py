"""The Fisher-Rao norm of the weights, from the data's own labels (Liang et al. 2019, arXiv 1711.01530)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from landscape.curvature.hessian_product import differentiable_attention
from landscape.curvature.operator import WHOLE, part_of
from landscape.subject.subject import Subject


def fisher_rao_terms(subject: Subject, parameters: Mapping[str, Tensor], i: int, part: slice = WHOLE) -> Tensor:
    """Terms <g, w>^2 of the samples of mini-batch i, or a part of it, (N,) float64, whose mean is w' F w.

    That is the squared norm. g is the gradient of the sample's loss by the weights w, so that F is the empirical Fisher
    matrix. All <g, w> come from one double backward pass: they are the derivatives of sum_i s_i <g_i, w> by s.
    """
    inputs, targets = part_of(subject, i, part)
    weights = list(parameters.values())
    with torch.enable_grad(), differentiable_attention():
        losses = subject.losses(subject.outputs(inputs), targets)
        shares = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            shares @ losses, weights, create_graph=True, allow_unused=True, materialize_grads=True
        )
        along = torch.stack([(g * w.detach()).sum() for g, w in zip(gradients, weights, strict=True)]).sum()
    (slopes,) = torch.autograd.grad(along, shares)
    return slopes.double().square()

"""Exact terms of flatness measures: relative flatness of the last layer, and the Fisher-Rao norm of the weights."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from landscape.data.structure import Nested
from landscape.products.hessian_product import differentiable_attention
from landscape.products.operator import WHOLE, part_of
from landscape.subject.linear_head import NormalisedLogits, linear_head, normalised
from landscape.subject.subject import Subject


def relative_flatness(subject: Subject, i: int, part: slice = WHOLE) -> Tensor:
    """Terms of the samples of mini-batch i, or a part of it, (N,) float64, whose mean is sum_{s,t} <w_s, w_t> Tr H_st.

    That is the relative flatness of the last linear layer (Petzka et al. 2021, arXiv 2001.00939).

    w_s are the rows of the weights of the last layer, z = W x + b, H_st the blocks of the Hessian of the loss with
    respect to them. With the Hessian K of a sample's loss with respect to its logits z, H_st = K_st x x', so that its
    term is |x|^2 sum_{s,t} K_st <w_s, w_t>: a forward pass and the K of all samples, and no estimate.

    Raises:
        ValueError: the logits (N, C) are not those of a linear layer.
    """
    inputs, targets = part_of(subject, i, part)
    found = linear_head(_unnormalised(subject), inputs)
    if found is None or found[2].dim() != 2:
        raise ValueError("the logits are not the outputs (N, classes) of a linear layer")
    head, features, logits = found
    weight = head.weight.detach()
    alike = (weight @ weight.T).double()  # <w_s, w_t>
    terms = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for s, row in enumerate(_hessian_rows(subject, logits.detach().clone(), targets)):
        terms += row.double() @ alike[s]
    return features.detach().double().square().sum(dim=1) * terms


def has_relative_flatness(subject: Subject) -> bool:
    """Whether the logits (N, C) are those of a linear layer, and the loss is one per sample."""
    if subject.members or subject.traits.mean_only or subject.traits.coupled:
        return False
    found = linear_head(_unnormalised(subject), subject.example()[0])
    return found is not None and found[2].dim() == 2 and found[1].dim() == 2


def _unnormalised(subject: Subject) -> Subject:
    """The subject whose outputs are the logits of the last layer."""
    return replace(subject, forward=subject.forward.base) if isinstance(subject.forward, NormalisedLogits) else subject


def _hessian_rows(subject: Subject, logits: Tensor, targets: Nested) -> list[Tensor]:
    """Rows K_s of the Hessian of every sample's loss with respect to its logits, (N, C) each."""
    with torch.enable_grad():
        logits.requires_grad_()
        given = normalised(logits) if isinstance(subject.forward, NormalisedLogits) else logits
        loss = subject.losses(given, targets).sum()
        (slope,) = torch.autograd.grad(loss, logits, create_graph=True)
        slope = slope + 0 * logits  # a loss that is linear in the logits has a graph too
        return [torch.autograd.grad(of.sum(), logits, retain_graph=True)[0] for of in slope.unbind(dim=1)]


def fisher_rao_terms(subject: Subject, parameters: Mapping[str, Tensor], i: int, part: slice = WHOLE) -> Tensor:
    """Terms <g, w>^2 of the samples of mini-batch i, or a part of it, (N,) float64, whose mean is w' F w.

    That is the squared Fisher-Rao norm, from the data's own labels (Liang et al. 2019, arXiv 1711.01530). g is the
    gradient of the sample's loss by the weights w, so that F is the empirical Fisher matrix. All <g, w> come from one
    double backward pass: they are the derivatives of sum_i s_i <g_i, w> by s.
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

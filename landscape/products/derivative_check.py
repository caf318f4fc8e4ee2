"""Check that what a network differentiates is its loss: the gradient and a Hessian product against differences.

Losses with detached weights, autograd functions with a backward pass of their own and stop-gradients have gradients
that are not the derivative of the loss, or second derivatives that are not those of the gradient. Curvature is then
that of something else, however well its eigenvalues converge.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from landscape.data.structure import Nested, map_tensors
from landscape.probe import derived_seed
from landscape.products.double_precision import double_of
from landscape.products.hessian_product import differentiable_attention
from landscape.products.vectors import unflat
from landscape.random_vectors import normal
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

DIRECTIONS = 3  # each with a tenth of the last step, as kinks of ReLU may lie within one; the best counts
ASIDE = 1e-3  # of the weights, in their units, for all but the first direction: untrained ReLUs lie exactly on kinks
FIRST, SECOND = 1e-5, 1e-7  # steps of differences of the loss and of the gradient, in units of the weights
TOLERANCE = 1e-3
LARGEST = 1 << 32  # bytes of the weights in double precision, above which nothing is checked
Tensors = Sequence[Tensor]
Gradient = Callable[[bool], list[Tensor]]  # of the loss; with its graph
_log = logging.getLogger(__name__)


@once_per_weights
def disagreement(subject: Subject) -> str:
    """In words, how derivatives of a few samples' loss disagree with its differences; "" where they agree.

    A dozen passes of a few samples in double precision per direction, until one agrees. A network that cannot be run
    so is not checked.
    """
    if subject.members or 8 * subject.size > LARGEST:
        return ""
    try:
        found = _compared(subject)
    except Exception as error:  # of a foreign model, which the measurement itself names
        _log.info("derivatives are not checked in double precision: %s", error)
        return ""
    if found:
        _log.warning("warning: %s", found)
    return found


def _compared(subject: Subject) -> str:
    inputs, targets = map_tensors(subject.example(), lambda t: t.double() if t.is_floating_point() else t)
    with double_of(subject).current() as copy, torch.enable_grad(), differentiable_attention():
        named = dict(copy.named_parameters())
        weights = [named[name] for name in subject.parameters]
        for weight in weights:
            weight.requires_grad_(True)  # until the copy is given back
        try:
            return _disagreement(subject, copy, weights, inputs, targets)
        finally:
            for weight in weights:
                weight.requires_grad_(False)


def _disagreement(subject: Subject, copy: nn.Module, weights: Tensors, inputs: Nested, targets: Nested) -> str:
    """In words, how first or second derivatives disagree in the direction that agrees best; see `_slopes`."""

    def loss() -> Tensor:
        return subject.losses(subject.forward(copy, inputs), targets).mean()

    def gradient(graph: bool) -> list[Tensor]:
        return list(torch.autograd.grad(loss(), weights, create_graph=graph, allow_unused=True, materialize_grads=True))

    size = sum(w.numel() for w in weights)
    rounding = _rounding(loss())
    coarser = (rounding / torch.finfo(torch.double).eps) ** (1 / 3)  # steps of a loss in single precision
    scale = (_inner(weights, weights).detach() / size).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    pairs: list[list[float]] = []
    found = ""
    for i in range(DIRECTIONS):
        u, v, aside = (
            [scale * part for part in unflat(normal(size, seed, device=scale.device, dtype=scale.dtype), weights)]
            for seed in (derived_seed(0, i, name) for name in ("u", "v", "aside"))
        )
        _move(weights, aside, ASIDE if i else 0.0)
        pairs += torch.stack(
            [
                _slopes(weights, u, loss, gradient, coarser * FIRST / 10**i),
                _curvatures(weights, u, v, gradient, coarser * SECOND, rounding),
            ]
        ).tolist()
        _move(weights, aside, -ASIDE if i else 0.0)
        found = _in_words(_closest(pairs[::2]), _closest(pairs[1::2]))
        if not found:
            break
    return found


def _rounding(loss: Tensor) -> float:
    """Relative spacing of numbers where a loss comes in single precision, as from a model that converts its logits."""
    return torch.finfo(loss.dtype).eps


def _slopes(weights: Tensors, u: Tensors, loss: Callable[[], Tensor], gradient: Gradient, step: float) -> Tensor:
    """The derivative of the loss along u: by autograd, by differences, and the size that is typical."""
    values = []
    for sign in (1, -1):
        _move(weights, u, sign * step)
        values.append(loss().detach())
        _move(weights, u, -sign * step)
    slope = gradient(False)
    typical = (_inner(slope, slope) * _inner(u, u) / sum(w.numel() for w in weights)).sqrt()
    noise = _rounding(values[0]) * values[0].abs() / step / TOLERANCE
    difference = (values[0] - values[1]) / (2 * step)
    return torch.stack([_inner(slope, u), difference.to(typical), torch.maximum(typical, noise.to(typical))]).detach()


def _curvatures(weights: Tensors, u: Tensors, v: Tensors, gradient: Gradient, step: float, rounding: float) -> Tensor:
    """The second derivative along u and v, v' H u, likewise."""
    slope = gradient(True)
    along = _inner(slope, u)
    product = [torch.zeros_like(w) for w in weights]
    if along.requires_grad:
        product = list(torch.autograd.grad(along, weights, allow_unused=True, materialize_grads=True))
    slopes = []
    for sign in (1, -1):
        _move(weights, u, sign * step)
        slopes.append(gradient(False))
        _move(weights, u, -sign * step)
    difference = [(a - b) / (2 * step) for a, b in zip(*slopes, strict=True)]
    size = torch.maximum(_inner(product, product), _inner(difference, difference))
    typical = (size * _inner(v, v) / sum(w.numel() for w in weights)).sqrt()
    coarse = rounding / step / TOLERANCE if rounding > torch.finfo(torch.double).eps else 0.0
    noise = (1e-7 + coarse) * (_inner(slopes[0], slopes[0]) * _inner(v, v)).sqrt()  # of a loss without curvature
    return torch.stack([_inner(product, v), _inner(difference, v), torch.maximum(typical, noise)]).detach()


def _closest(pairs: Sequence[Sequence[float]]) -> Sequence[float]:
    return min(pairs, key=lambda pair: abs(pair[0] - pair[1]) / max(abs(pair[0]), abs(pair[1]), pair[2], 1e-300))


def _in_words(slopes: Sequence[float], curvatures: Sequence[float]) -> str:
    for (own, other, typical), what in (
        (slopes, "the gradient is not the derivative of the loss ({} by autograd, {} by differences of the loss)"),
        (curvatures, "second derivatives are not those of the gradient ({} by autograd, {} by differences)"),
    ):
        if not abs(own - other) <= TOLERANCE * max(abs(own), abs(other), typical):
            said = what.format(f"{own:.4g}", f"{other:.4g}")
            if math.isnan(own):
                zeros = "the norm of a vector of zeros, as F.normalize of padded tokens"
                return f"{said}: an operation has no such derivative in autograd where it is taken, for example {zeros}"
            return (
                f"{said}: detached terms, stop-gradients, straight-through rounding, checkpointing with "
                "use_reentrant=True, an input that is the padding_idx of its embedding, or an autograd function with "
                "a backward pass of its own; curvature is that of what is differentiated, not of the loss"
            )
    return ""


def _move(weights: Sequence[Tensor], u: Sequence[Tensor], step: float) -> None:
    with torch.no_grad():
        for weight, part in zip(weights, u, strict=True):
            weight.add_(part, alpha=step)


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()

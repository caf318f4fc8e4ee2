"""Cross-entropy of a language model without all its logits: some tokens at a time, in both derivatives.

Logits of a vocabulary of 50,000 words take more memory than everything else, and a gradient graph holds several tensors
of their size. Here neither the loss nor its derivatives store them: each computes those of some tokens again, from the
hidden states and the weights of the last layer, and the second derivative follows from a formula. Exact to rounding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from landscape.data.structure import Nested, rows_of
from landscape.subject.linear_head import linear_head
from landscape.subject.losses import IGNORED, cross_entropy, mean_over_labelled, with_ignored
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

LOGITS = 2**23  # logits held at once; a loss with fewer is computed as it is


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The cross-entropy of every sequence, (N,), of the logits hidden @ weight' + bias, which are never all computed.

    `hidden` (N, tokens, width), `weight` (vocabulary, width), `bias` (vocabulary,) or None, `targets` (N, tokens).
    Tokens with a negative target do not count. Differentiable twice: a chunk of logits is held at a time, also for a
    graph that is kept.
    """
    losses: Tensor = _Losses.apply(hidden.flatten(0, 1), weight, bias, with_ignored(targets).flatten())  # type: ignore[no-untyped-call]
    return mean_over_labelled(losses, targets)


def chunked_head(subject: Subject, targets: Nested) -> nn.Linear | None:
    """The last layer of a language model whose loss is computed in chunks; None for other models, and few tokens."""
    if not isinstance(targets, Tensor) or targets.dim() != 2 or targets.is_floating_point():
        return None
    head = _head(subject)
    return head if head is not None and targets.numel() * head.out_features > LOGITS else None


def losses_of(subject: Subject, head: nn.Linear | None, outputs: Callable[[], Any], targets: Any) -> Tensor:
    """The losses of samples, (N,), without logits where the model has this `chunked_head`; `outputs` runs it."""
    if head is None:
        return subject.losses(outputs(), targets)
    head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    try:
        hidden = outputs()  # what the last layer is given, in place of the logits
    finally:
        del head.forward
    return chunked_cross_entropy(hidden, head.weight, head.bias, targets)


def tokens_at_once(subject: Subject) -> int:
    """How many tokens have their logits held at once, where that is not all of the first mini-batch; else 0."""
    head = chunked_head(subject, subject.batch(0)[1])
    return max(1, LOGITS // head.out_features) if head is not None else 0


@once_per_weights
def _head(subject: Subject) -> nn.Linear | None:
    """The linear layer whose outputs, as they are, are the logits of sequences; None if there is none."""
    if subject.losses is not cross_entropy or subject.members:
        return None
    found = linear_head(subject, rows_of(subject.batch(0)[0], slice(1)))
    return found[0] if found is not None and found[2].dim() == 3 else None


def _rows(targets: Tensor, weight: Tensor) -> Iterator[slice]:
    """Tokens whose logits are held together."""
    size = max(1, LOGITS // len(weight))
    return (slice(at, min(at + size, len(targets))) for at in range(0, len(targets), size))


class _Losses(torch.autograd.Function):
    """The loss of every token, (T,), from hidden states (T, D), weight (V, D), bias and targets (T,)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        parts = [
            F.cross_entropy(F.linear(hidden[rows], weight, bias), targets[rows], reduction="none")
            for rows in _rows(targets, weight)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Any:
        return (*_Gradients.apply(*ctx.saved_tensors, slopes), None)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    """The gradient of sum_t slope_t loss_t by hidden states, weight and bias.

    With p the probabilities of a token, e = slope (p - onehot) is the gradient by its logits. The inner product of the
    gradients with cotangents (H, W, b) is sum e . q, q = H weight' + hidden W' + b, whose derivative by the logits is
    m = slope p (q - p . q); those by the inputs follow.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, slopes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight, bias, targets, slopes)
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        for rows in _rows(targets, weight):
            error = F.linear(hidden[rows], weight, bias).softmax(dim=1)
            error = _less_target(error, targets[rows]).mul_(slopes[rows, None])
            of_hidden[rows] = error @ weight
            of_weight.addmm_(error.T, hidden[rows])
            if of_bias is not None:
                of_bias += error.sum(dim=0)
        return of_hidden, of_weight, of_bias

    @staticmethod
    def backward(ctx: Any, to_hidden: Tensor, to_weight: Tensor, to_bias: Tensor | None) -> Any:
        hidden, weight, bias, targets, slopes = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        of_slopes = torch.empty_like(slopes)
        for rows in _rows(targets, weight):
            p = F.linear(hidden[rows], weight, bias).softmax(dim=1)
            q = torch.addmm(F.linear(to_hidden[rows], weight, to_bias), hidden[rows], to_weight.T)
            known = (targets[rows] != IGNORED)[:, None]
            q -= q.gather(1, targets[rows].clamp(min=0)[:, None])  # a constant counts nowhere, and nothing cancels now
            mean = (p * q).sum(dim=1, keepdim=True)
            curved = (q - mean).mul_(p).mul_(slopes[rows, None] * known)
            of_slopes[rows] = (mean * known)[:, 0]
            error = _less_target(p, targets[rows]).mul_(slopes[rows, None])
            of_hidden[rows] = (curved @ weight).addmm_(error, to_weight)
            of_weight.addmm_(curved.T, hidden[rows]).addmm_(error.T, to_hidden[rows])
            if of_bias is not None:
                of_bias += curved.sum(dim=0)
        return of_hidden, of_weight, of_bias, None, of_slopes


def _less_target(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Probabilities less 1 at the target of every token, in place; zero for tokens without a loss.

    There it is minus the sum of the others, which single precision would round away beside 1.
    """
    known = (targets != IGNORED)[:, None]
    at = targets.clamp(min=0)[:, None]
    others = probabilities.scatter_(1, at, 0.0).sum(dim=1, keepdim=True)
    return probabilities.scatter_(1, at, -others).mul_(known)

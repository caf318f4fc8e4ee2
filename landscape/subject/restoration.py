"""Measure a model without changing it: evaluation mode meanwhile, everything as before afterwards, even on errors."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def recording_graphs() -> Iterator[None]:
    """Forward passes that record a graph, also inside of inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def refusing_written_weights(model: nn.Module) -> Iterator[None]:
    """Reject a model whose passes in the block write its weights, which are restored: a moved weight would not stay.

    Raises:
        ValueError: naming the weight.
    """
    weights = [(name, p) for name, p in model.named_parameters() if not nn.parameter.is_lazy(p)]
    before = [(name, p, p.data, p.data_ptr(), p._version, p.detach().clone()) for name, p in weights]
    try:
        yield
    finally:
        written = [
            (name, p, data, values)
            for name, p, data, place, version, values in before
            if p.data_ptr() != place or p._version != version or not _same(p.detach(), values)
        ]
        with torch.no_grad():
            for _, p, data, values in written:
                p.data = data
                p.copy_(values)
    if written:
        raise ValueError(
            f"the forward pass writes the model's own weights ({written[0][0]}), so that weights moved for a "
            "measurement would not stay where they are put; apply the constraint (max_norm, renorm, clamp) to the "
            "weights once, save them, and measure without it, or register it as a parametrization "
            "(torch.nn.utils.parametrize)"
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, whose modes, gradients and buffers are as before afterwards."""
    parameters = [(p, p.grad, p.requires_grad, p._backward_hooks) for p in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer)  # which the first pass makes
    ]
    try:
        for p, *_ in parameters:
            p.grad = None  # a backward pass would add to it
            p._backward_hooks = None  # of the caller's: one that scales gradients would scale those measured here
        with evaluation_mode(model):
            yield
    finally:
        for p, gradient, trainable, hooks in parameters:
            p.grad = gradient
            p.requires_grad_(trainable)
            p._backward_hooks = hooks
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            buffer.data.copy_(before)  # by `data`: to autograd, which may hold a graph of the caller's, nothing changed

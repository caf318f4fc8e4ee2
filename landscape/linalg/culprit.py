"""Which layer of a model has no second derivative."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from landscape.linalg.hessian import refuse_severed


def once_differentiable(model: nn.Module, forward: Callable[[], object]) -> str:
    """The innermost module that can be differentiated only once, as `name (class)`; "" where none is found.

    Every module is run by itself, on what it got, and differentiated twice: inner ones before those around them.

    Args:
        model: to search in.
        forward: runs it once.
    """
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    testing = False

    def test(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any], returned: object) -> None:
        nonlocal testing
        if testing or found:
            return
        testing = True
        try:
            if not _twice(module, given, options):
                found.append(f"{names[module] or 'the model'} ({type(module).__name__})")
        finally:
            testing = False

    handles = [module.register_forward_hook(test, with_kwargs=True) for module in names]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _twice(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1].clone()  # which a module may write to in place

    with torch.enable_grad(), contextlib.suppress(StopIteration):
        returned = module(*map(leaf, given), **{name: leaf(value) for name, value in options.items()})
        output = next(value for value in _tensors(returned) if value.requires_grad)
        try:
            first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True, allow_unused=True)
            linked = [g for g in first if g is not None and g.requires_grad]
            refuse_severed(linked)
            if linked:
                torch.autograd.grad([g.square().sum() for g in linked], leaves, allow_unused=True)
        except (RuntimeError, ValueError):
            return False
    return True


def _tensors(returned: object) -> list[Tensor]:
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, dict):
        return [tensor for value in returned.values() for tensor in _tensors(value)]
    return [tensor for value in returned for tensor in _tensors(value)] if isinstance(returned, tuple | list) else []

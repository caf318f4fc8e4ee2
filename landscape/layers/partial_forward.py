"""Starting a forward pass in the middle: calls before a point give what they gave before instead of running again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from landscape.layers.graph import Flow
from landscape.layers.residual_blocks import Tap

Kept = Mapping[Tap, Any]  # what calls of modules returned; of those that nothing reads again, the shapes alone


@dataclass(frozen=True)
class Prefix:
    """What need not run again before a point of a forward pass.

    Args:
        point: number of operations before it.
        skipped: calls that have finished by then, outermost ones only.
        live: those of them whose outputs are read afterwards.
    """

    point: int = 0
    skipped: frozenset[Tap] = frozenset()
    live: frozenset[Tap] = frozenset()


def prefix_of(flow: Flow, changed: Sequence[Tap], read: Sequence[Tap]) -> Prefix:
    """The prefix up to the end of the first of the calls whose outputs will be changed.

    Args:
        flow: a recorded pass.
        changed: calls whose outputs something replaces.
        read: those of them for which it reads the first input instead of the output.
    """
    at = {Tap(call.module, "output", call.number): i for i, call in enumerate(flow.calls)}
    holding = {outer for tap in changed for outer in flow.enclosing(at[tap])} - {at[tap] for tap in changed}
    first = min((at[tap] for tap in changed), key=lambda i: (flow.calls[i].stop, i))
    point = flow.calls[first].stop
    skipped: set[int] = set()
    for i, call in enumerate(flow.calls[: first + 1]):
        if call.stop <= point and i not in holding and skipped.isdisjoint(flow.enclosing(call.parent)):
            skipped.add(i)
    needed = set(flow.calls[0].writes)
    made = set()
    for operation in flow.operations:
        if skipped.isdisjoint(flow.enclosing(operation.call)):
            needed |= set(operation.reads)
        else:
            made |= set(operation.writes)
    needed |= {flow.calls[at[tap]].reads[0] for tap in read if at[tap] in skipped}
    given = {i: set(flow.calls[i].writes) & needed for i in skipped}
    if (needed & made) - set().union(*given.values()):
        return Prefix()  # something reaches past the modules, by an attribute or a closure
    taps = {i: Tap(flow.calls[i].module, "output", flow.calls[i].number) for i in skipped}
    return Prefix(point, frozenset(taps.values()), frozenset(taps[i] for i in skipped if given[i]))


def advanced(model: nn.Module, inputs: Tensor, prefix: Prefix, kept: Kept) -> Kept:
    """What a prefix needs for these inputs, from what an earlier prefix kept of them: runs what lies between, no more.

    Raises:
        LookupError: the model does not call what it called when it was recorded.
    """
    missing = prefix.skipped - kept.keys()
    found = {tap: kept[tap] for tap in prefix.skipped & kept.keys()}
    if not missing:
        return found

    def keep(tap: Tap, output: Any) -> None:
        if tap in missing:
            found[tap] = mapped(output, torch.clone if tap in prefix.live else _shape)
            if len(found) == len(prefix.skipped):
                raise _Reached

    try:
        with resumed(model, kept), torch.inference_mode(), _listening(model, {tap.module for tap in missing}, keep):
            model(inputs)
    except _Reached:
        pass
    if len(found) < len(prefix.skipped):
        raise LookupError("the model takes another way than when it was recorded")
    return found


@contextmanager
def resumed(model: nn.Module, kept: Kept) -> Iterator[None]:
    """The model with the kept calls returning what they returned; everything is put back, also after an exception."""
    modules = dict(model.named_modules())
    counts: dict[str, int] = {}

    def shortened(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = counts[name] = counts.get(name, -1) + 1
            tap = Tap(name, "output", number)
            # Copies: what comes after may work in place.
            return mapped(kept[tap], _again) if tap in kept else forward(*args, **kwargs)

        return call

    names = {tap.module for tap in kept}
    own = {name: vars(modules[name]).get("forward") for name in names}
    start = model.register_forward_pre_hook(lambda module, args: counts.clear())
    try:
        for name in names:
            modules[name].forward = shortened(name, modules[name].forward)
        yield
    finally:
        start.remove()
        for name in names:
            if own[name] is not None:
                modules[name].forward = own[name]
            elif "forward" in vars(modules[name]):
                del modules[name].forward


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with its tensors changed, in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return type(value)({key: mapped(part, change) for key, part in value.items()})
    return value


class _Reached(Exception):
    """Ends a forward pass where all that was wanted of it is there."""


class _Shape(Tensor):
    """A tensor on the meta device that knows where it came from."""

    home: torch.device


def _shape(tensor: Tensor) -> Tensor:
    shape = torch.empty_like(tensor, device="meta").as_subclass(_Shape)
    shape.home = tensor.device
    return shape


def _again(tensor: Tensor) -> Tensor:
    """A copy; of a tensor whose values nothing reads, its shape filled with what would be noticed."""
    if isinstance(tensor, _Shape):
        room = torch.empty_like(tensor.as_subclass(Tensor), device=tensor.home)
        return room.fill_(torch.nan) if room.is_floating_point() else room
    return tensor.clone()


@contextmanager
def _listening(model: nn.Module, names: set[str], keep: Callable[[Tap, Any], None]) -> Iterator[None]:
    modules = dict(model.named_modules())
    counts: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            number = counts[name] = counts.get(name, -1) + 1
            keep(Tap(name, "output", number), output)

        return hook

    handles = [model.register_forward_pre_hook(lambda module, args: counts.clear())]
    handles += [modules[name].register_forward_hook(hook_of(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

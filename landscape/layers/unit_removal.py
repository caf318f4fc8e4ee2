"""Removing one unit from a trained network, and putting it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from landscape.layers.residual_blocks import Tap
from landscape.layers.selection import Layer

POOLING = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Removal:
    """One unit that can be removed and how.

    Args:
        name: dotted name of the module it removes.
        rule: in words, what happens instead.
        layer: the layer its branch ends in.
        zeroed: calls whose output becomes 0.
        bypassed: calls whose output becomes their input, pooled by `stride` where that is above 1.
    """

    name: str
    rule: str
    layer: Layer
    zeroed: tuple[Tap, ...] = ()
    bypassed: tuple[Tap, ...] = ()
    stride: int = 1


def removals(model: nn.Module, layers: Sequence[Layer]) -> list[Removal]:
    """Every unit of a network, one per residual branch, in order of depth.

    MSA, MLP and basic-block branches contribute nothing (the skip stays). In a bottleneck the only spatial
    convolution is bypassed together with the norm and activation that belong to it; in a network without skips every
    convolution and linear layer with as many channels before as after it.
    """
    modules = dict(model.named_modules())
    found = []
    for layer in layers:
        branch = layer.branch
        if branch is not None and not branch.skip and _passes(modules, branch.leaves):
            found.append(_bypass(modules, layer, branch.leaves[0], branch.leaves))
        if branch is None or branch.end is None:
            continue
        bottleneck = _bottleneck(modules, branch.leaves) if layer.kind == "conv" else None
        found.append(_bypass(modules, layer, *bottleneck) if bottleneck else _zero(layer, branch.end))
    return found


@contextmanager
def removed(model: nn.Module, *parts: Removal) -> Iterator[None]:
    """The network without the units, for the time of the block; also after an exception nothing stays changed."""
    modules = dict(model.named_modules())
    counts: dict[str, int] = {}
    changes: dict[Tap, Callable[[tuple[Any, ...], Any], Any]] = {}
    for removal in parts:
        changes |= dict.fromkeys(removal.zeroed, _zeros) | dict.fromkeys(removal.bypassed, _input(removal.stride))

    def hook_of(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            number = counts[name] = counts.get(name, -1) + 1
            change = changes.get(Tap(name, "output", number))
            return change(args, output) if change else None

        return hook

    handles = [model.register_forward_pre_hook(lambda module, args: counts.clear())]
    handles += [modules[name].register_forward_hook(hook_of(name)) for name in {tap.module for tap in changes}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Group:
    """What one measurement removes: a unit, two neighbours, or all units of a stage.

    Args:
        layer: says name, kind, stage and depth of the whole; `other` where the kinds of its parts differ.
        rule: in words, what happens instead.
        parts: the units.
    """

    layer: Layer
    rule: str
    parts: tuple[Removal, ...]


def singles(found: Sequence[Removal]) -> list[Group]:
    """Every unit by itself."""
    return [_group(unit.name, [unit]) for unit in found]


def pairs(found: Sequence[Removal]) -> list[Group]:
    """Every unit together with the next."""
    return [_group(f"{one.name} + {next.name}", [one, next]) for one, next in pairwise(found)]


def stages(found: Sequence[Removal]) -> list[Group]:
    """All units of every stage, named after the module that holds no others, or else by number."""
    members: dict[int, list[Removal]] = {}
    for unit in found:
        members.setdefault(unit.layer.stage, []).append(unit)
    names = [_shared([unit.name for unit in units]) for units in members.values()]
    alone = all(names) and not any(a != b and f"{b}.".startswith(f"{a}.") for a in names for b in names)
    if not alone or len(set(names)) < len(names):
        names = [f"stage {stage}" for stage in members]
    return [_group(name, units) for name, units in zip(names, members.values(), strict=True)]


def _group(name: str, parts: Sequence[Removal]) -> Group:
    layers = [part.layer for part in parts]
    kinds = {layer.kind for layer in layers}
    layer = replace(
        layers[0],
        name=name,
        kind=kinds.pop() if len(kinds) == 1 else "other",
        depth=sum(layer.depth for layer in layers) / len(layers),
        reduces=any(layer.reduces for layer in layers),
    )
    return Group(layer, "; ".join(dict.fromkeys(part.rule for part in parts)), tuple(parts))


def _shared(names: Sequence[str]) -> str:
    """The dotted beginning that names have in common."""
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _zeros(args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple | list):  # attention modules return (output, weights)
        return type(output)([torch.zeros_like(output[0]), *output[1:]])
    return torch.zeros_like(output)


def _input(stride: int) -> Callable[[tuple[Any, ...], Any], Tensor]:
    def change(args: tuple[Any, ...], output: Tensor) -> Tensor:
        given: Tensor = args[0]
        if given.shape == output.shape:
            return given
        return F.avg_pool2d(given, stride, stride, ceil_mode=True)

    return change


def _zero(layer: Layer, end: Tap) -> Removal:
    return Removal(layer.name, "residual branch contributes nothing", layer, zeroed=(end,))


def _bypass(modules: dict[str, nn.Module], layer: Layer, conv: Tap, group: tuple[Tap, ...]) -> Removal:
    module = modules[conv.module]
    what, stride = "linear layer", 1
    if isinstance(module, nn.Conv2d):
        what, stride = f"{'x'.join(map(str, module.kernel_size))} conv", max(module.stride)
    parts = ", ".join(tap.module.rpartition(".")[2] for tap in group)
    instead = "identity" if stride == 1 else f"{stride}x{stride} average pooling"
    return Removal(conv.module, f"{what} bypassed by {instead} ({parts})", layer, bypassed=group, stride=stride)


def _bottleneck(modules: dict[str, nn.Module], leaves: Sequence[Tap]) -> tuple[Tap, tuple[Tap, ...]] | None:
    """The only spatial convolution between two pointwise layers, with its norm and activation."""
    heavy = [tap for tap in leaves if isinstance(modules[tap.module], nn.Conv2d | nn.Linear)]
    spatial = [tap for tap in heavy if _spatial(modules[tap.module])]
    if len(spatial) != 1 or spatial[0] in (heavy[0], heavy[-1]):
        return None
    conv = modules[spatial[0].module]
    assert isinstance(conv, nn.Conv2d)
    if conv.in_channels != conv.out_channels:
        return None
    at = leaves.index(spatial[0])
    preactivated = isinstance(modules[leaves[-1].module], nn.Conv2d)  # a branch that ends without a norm
    others = reversed(leaves[:at]) if preactivated else leaves[at + 1 :]
    group = [spatial[0]]
    for tap in others:
        module = modules[tap.module]
        if isinstance(module, POOLING) or (list(module.parameters()) and not isinstance(module, NORMS)):
            break
        group.append(tap)
    return spatial[0], tuple(group)


def _passes(modules: dict[str, nn.Module], leaves: Sequence[Tap]) -> bool:
    """Whether the first of some modules gives the shape it takes, but for a stride, so that they can be bypassed."""
    module = modules[leaves[0].module] if leaves else None
    if isinstance(module, nn.Conv2d):
        sides = zip(module.kernel_size, module.dilation, strict=True)
        if isinstance(module.padding, str):
            same = module.padding == "same"
        else:
            same = all(2 * p == d * (k - 1) for p, (k, d) in zip(module.padding, sides, strict=True))
        return same and module.in_channels == module.out_channels
    return isinstance(module, nn.Linear) and module.in_features == module.out_features


def _spatial(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and max(module.kernel_size) > 1

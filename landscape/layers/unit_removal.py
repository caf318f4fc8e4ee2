"""Remove units (residual branches, convolutions, linear layers) from a trained network, and restore them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from landscape.discovery.layer import Layer, Tap
from landscape.layers.forward_hooks import hooked_calls

POOLING_MODULES = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)
NORM_MODULES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Removal:
    """How one unit is removed."""

    name: str  # dotted name of the module that is removed
    rule: str  # in words, what replaces it
    layer: Layer  # the layer its branch ends in
    zeroed: tuple[Tap, ...] = ()  # calls whose output becomes 0
    bypassed: tuple[Tap, ...] = ()  # calls whose output becomes their input
    stride: int = 1  # by which that input is average-pooled


def removals(model: nn.Module, layers: Sequence[Layer]) -> list[Removal]:
    """Every unit of a network that can be removed, one per residual branch, in order of depth.

    The output of an MSA, MLP or basic-block branch is zeroed (the skip stays). In a bottleneck the only spatial
    convolution is bypassed with its norm and activation. In a network without skips, every convolution and linear layer
    with as many input as output channels is bypassed.
    """
    modules = dict(model.named_modules())
    found = []
    for layer in layers:
        branch = layer.branch
        if branch is not None and not branch.skip and _keeps_shape(modules, branch.leaves):
            found.append(_bypass(modules, layer, branch.leaves))
        if branch is None or branch.end is None:
            continue
        bottleneck = _bottleneck(modules, branch.leaves) if layer.kind == "conv" else ()
        zeroed = Removal(layer.name, "residual branch contributes nothing", layer, zeroed=(branch.end,))
        found.append(_bypass(modules, layer, bottleneck) if bottleneck else zeroed)
    return found


@contextmanager
def removed(model: nn.Module, *units: Removal) -> Iterator[None]:
    """Run the block with the units removed; the network is restored afterwards, also after an exception."""
    changes: dict[Tap, Callable[[tuple[Any, ...], Any], Any]] = {}
    for unit in units:
        changes |= dict.fromkeys(unit.zeroed, _zeros) | dict.fromkeys(unit.bypassed, partial(_input, unit.stride))

    def replaced(tap: Tap, args: tuple[Any, ...], output: Any) -> Any:
        return changes[tap](args, output) if tap in changes else None

    with hooked_calls(model, {(tap.module, tap.side) for tap in changes}, replaced):
        yield


@dataclass(frozen=True)
class Group:
    """The units that one measurement removes together: one, two neighbours, or all of a stage."""

    layer: Layer  # carries name, kind, stage and depth of the group; kind `other` where the units differ in kind
    rule: str  # in words, what replaces them
    units: tuple[Removal, ...]


def singles(units: Sequence[Removal]) -> list[Group]:
    """Every unit by itself."""
    return [_group(unit.name, [unit]) for unit in units]


def pairs(units: Sequence[Removal]) -> list[Group]:
    """Every unit together with the next."""
    return [_group(f"{one.name} + {following.name}", [one, following]) for one, following in pairwise(units)]


def stages(units: Sequence[Removal]) -> list[Group]:
    """All units of every stage, named after their common parent module where those are distinct, else by number."""
    members: dict[int, list[Removal]] = {}
    for unit in units:
        members.setdefault(unit.layer.stage, []).append(unit)
    names = [_common_parent([unit.name for unit in group]) for group in members.values()]
    distinct = all(names) and not any(a != b and f"{b}.".startswith(f"{a}.") for a in names for b in names)
    if not distinct or len(set(names)) < len(names):
        names = [f"stage {stage}" for stage in members]
    return [_group(name, group) for name, group in zip(names, members.values(), strict=True)]


def _group(name: str, units: Sequence[Removal]) -> Group:
    layers = [unit.layer for unit in units]
    kinds = {layer.kind for layer in layers}
    layer = replace(
        layers[0], name=name, kind=kinds.pop() if len(kinds) == 1 else "other",
        depth=sum(layer.depth for layer in layers) / len(layers), reduces=any(layer.reduces for layer in layers),
    )  # fmt: skip
    return Group(layer, "; ".join(dict.fromkeys(unit.rule for unit in units)), tuple(units))


def _common_parent(names: Sequence[str]) -> str:
    """The dotted name of the innermost module that contains all named ones; "" for the model."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _zeros(args: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, tuple | list):  # attention modules return (output, weights)
        return type(output)([torch.zeros_like(output[0]), *output[1:]])
    return torch.zeros_like(output)


def _input(stride: int, args: tuple[Any, ...], output: Tensor) -> Tensor:
    given: Tensor = args[0]
    if given.shape == output.shape:
        return given
    for axis in (-2, -1):  # without the padding that a network adds itself before the convolution
        extra = max(0, given.shape[axis] - stride * output.shape[axis])
        given = given.narrow(axis, extra // 2, given.shape[axis] - extra)
    return F.avg_pool2d(given, stride, stride, ceil_mode=True)


def _bypass(modules: dict[str, nn.Module], layer: Layer, group: tuple[Tap, ...]) -> Removal:
    """The removal of a convolution or linear layer, the first of the group, with its norm and activation."""
    module = modules[group[0].module]
    what, stride = "linear layer", 1
    if isinstance(module, nn.Conv2d):
        what, stride = f"{'x'.join(map(str, module.kernel_size))} conv", max(module.stride)
    parts = ", ".join(tap.module.rpartition(".")[2] for tap in group)
    instead = "identity" if stride == 1 else f"{stride}x{stride} average pooling"
    return Removal(group[0].module, f"{what} bypassed by {instead} ({parts})", layer, bypassed=group, stride=stride)


def _bottleneck(modules: dict[str, nn.Module], leaves: Sequence[Tap]) -> tuple[Tap, ...]:
    """The only spatial convolution with its norm and activation, if it lies between pointwise layers; else ()."""
    heavy = [(tap, modules[tap.module]) for tap in leaves if isinstance(modules[tap.module], nn.Conv2d | nn.Linear)]
    spatial = [(tap, conv) for tap, conv in heavy if isinstance(conv, nn.Conv2d) and max(conv.kernel_size) > 1]
    if len(spatial) != 1 or spatial[0] in (heavy[0], heavy[-1]):
        return ()
    tap, conv = spatial[0]
    if conv.in_channels != conv.out_channels:
        return ()
    at = leaves.index(tap)
    preactivated = isinstance(modules[leaves[-1].module], nn.Conv2d)  # a branch that ends without a norm
    group = [leaves[at]]
    for tap in reversed(leaves[:at]) if preactivated else leaves[at + 1 :]:
        module = modules[tap.module]
        if isinstance(module, POOLING_MODULES) or (list(module.parameters()) and not isinstance(module, NORM_MODULES)):
            break
        group.append(tap)
    return tuple(group)


def _keeps_shape(modules: dict[str, nn.Module], leaves: Sequence[Tap]) -> bool:
    """Whether the first of some modules preserves the shape of its input, up to a stride, and so can be bypassed."""
    module = modules[leaves[0].module] if leaves else None
    if isinstance(module, nn.Conv2d):
        padding = () if isinstance(module.padding, str) else module.padding
        sides = zip(padding, module.kernel_size, module.dilation, strict=False)
        same = module.padding != "valid" and all(2 * p == d * (k - 1) for p, k, d in sides)
        return same and module.in_channels == module.out_channels
    return isinstance(module, nn.Linear) and module.in_features == module.out_features

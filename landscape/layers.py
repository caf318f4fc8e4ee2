"""The layers of any vision network, found by what it does: points of its residual stream, their kind and grid.

Nothing is known by a model's name. One recorded forward pass shows every addition of two branches that start at a
common point; the longer branch is a residual block, attention or convolution decides its kind, and the sum is a point
of the residual stream.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from torch import Tensor, nn

from landscape.dataflow import ATTENTION, Flow, Key, Node, record
from landscape.probe import OptionError, Quantity
from landscape.residuals import (
    ADDITIONS,
    HEAVY,
    POOLING,
    Kind,
    Layout,
    Residual,
    Tap,
    branch_end,
    branch_name,
    consumer_is_linear,
    direct_calls,
    heavy_calls,
    kind_of,
    layout_of,
    leaves,
    residuals,
    smaller,
    starts_linear,
    tap_of,
    window_of,
)
from landscape.subject import Subject


@dataclass(frozen=True)
class Branch:
    """The residual branch that ends in a layer.

    Args:
        block: dotted name of the module whose forward does the addition.
        leaves: calls of modules without children that the branch is made of, in order of execution.
        end: where the branch's contribution can be had last before the addition; None where no module makes it.
    """

    block: str
    leaves: tuple[Tap, ...]
    end: Tap | None


@dataclass(frozen=True)
class Attention:
    """The call of an attention function that a layer's branch makes.

    Args:
        key: name of the function, and how many calls of it came before in the pass.
        heads: how many maps it makes per image or window.
        sides: (rows, columns) of the positions that it mixes: the layer's grid, or one of its windows; (0, 0) where
            nothing explains their number.
        prefix: tokens before them.
    """

    key: Key
    heads: int
    sides: tuple[int, int]
    prefix: int


@dataclass(frozen=True)
class Layer:
    """A point of the residual stream after a block.

    Args:
        name: dotted module name: of the block, or of the module whose output is added to the stream.
        kind: what the block computes.
        stage: 0 for the stem, then counted up whenever the map gets smaller.
        depth: normalised, 0 to 1.
        reduces: whether the map gets smaller here.
        tap: where its tensor can be had.
        shape: of the tensor without the batch axis.
        layout: how channels and positions lie in it.
        grid: (H, W) of its positions; (0, 0) where there is none.
        prefix: tokens before those of the grid (class token, registers).
        branch: the residual branch, where there is one.
        attention: where its attention maps can be had.
    """

    name: str
    kind: Kind
    stage: int
    depth: float
    reduces: bool
    tap: Tap
    shape: tuple[int, ...]
    layout: Layout
    grid: tuple[int, int]
    prefix: int = 0
    branch: Branch | None = None
    attention: Attention | None = None

    @property
    def spatial(self) -> bool:
        """Whether it has a map of positions."""
        return self.grid != (0, 0)

    def maps(self, tensor: Tensor) -> Tensor:
        """The tensor as feature maps, (N, C, H, W)."""
        if self.layout == "channels first":
            return tensor
        if self.layout == "channels last":
            return tensor.permute(0, 3, 1, 2)
        height, width = self.grid
        tokens = tensor[:, self.prefix :, :].transpose(1, 2)  # (N, C, T)
        return tokens.reshape(len(tensor), -1, height, width)


def discover(model: nn.Module, example: Tensor) -> list[Layer]:
    """Every layer of a network in order of execution, from one forward pass of an example (N, C, H, W).

    Raises:
        ValueError: no residual stream can be seen; says what to do.
    """
    flow = record(model, example[:2])
    found = residuals(flow)
    if not found:
        raise ValueError(
            "no residual additions were found in this model; name the modules to listen to with --layers REGEX[:KIND]"
        )
    layers: list[Layer] = []
    position: Node = 0
    for residual in found:
        layers += _passage(flow, position, residual.fork, first=not layers, example=residual)
        layers.append(_layer(flow, residual))
        position = residual.sum
    return _staged(layers)


def chosen(model: nn.Module, example: Tensor, patterns: Sequence[str]) -> list[Layer]:
    """The layers that `--layers REGEX[:KIND]` names: outputs of modules, in order of execution; all without a pattern.

    Raises:
        OptionError: a pattern is no regular expression.
        ValueError: a pattern matches no module; lists near names.
    """
    if not patterns:
        return discover(model, example)
    flow = record(model, example[:2])
    try:
        known = {layer.name: layer for layer in discover(model, example)}
    except ValueError:
        known = {}
    names = [name for name, _ in model.named_modules() if name]
    kinds: dict[str, Kind | None] = {}
    for pattern in patterns:
        expression, kind = _split(pattern)
        try:
            matching = [name for name in names if re.search(expression, name)]
        except re.error as error:
            raise OptionError(f"--layers {pattern} is no regular expression ({error})") from None
        if not matching:
            near = difflib.get_close_matches(expression, names, 3, 0.3) or names[:3]
            hint = f"; kinds are {', '.join(get_args(Kind))}" if ":" in expression else ""
            raise ValueError(f"--layers {pattern} matches no module; near names are {', '.join(near)}{hint}")
        kinds.update(dict.fromkeys(matching, kind))
    layers = []
    for call in flow.calls:
        if call.module in kinds and call.number == 0 and call.writes:
            own = known.get(call.module)
            shape = flow.shapes[call.writes[0]][1:]
            layout, grid, prefix = layout_of(flow, call.writes[0], consumer_is_linear(flow, call.writes[0]))
            kind = kinds[call.module] or (own.kind if own else "other")
            tap = Tap(call.module, "output")
            attention = _attention(flow, range(call.start, call.stop), grid, prefix)
            layers.append(
                Layer(call.module, kind, 0, 0.0, False, tap, shape, layout, grid, prefix, attention=attention)
            )
    if not layers:
        raise ValueError("the modules that --layers names are not called in a forward pass; choose others")
    layers.sort(key=lambda layer: _finish(flow, layer.name))
    grids = [layer.grid for layer in layers]
    return _staged(
        [
            replace(layer, reduces=smaller(layer.grid, before))
            for before, layer in zip([grids[0], *grids], layers, strict=False)
        ]
    )


def layers_of(subject: Subject, patterns: Sequence[str] = ()) -> list[Layer]:
    """The layers of a subject, found once."""
    return subject.once(
        ("layers", tuple(patterns)), lambda: chosen(subject.model, subject.batch(0)[0], tuple(patterns))
    )


def spatial_layers(subject: Subject, patterns: Sequence[str] = ()) -> list[Layer]:
    """Those of them that have a map of positions.

    Raises:
        ValueError: there is none.
    """
    found = [layer for layer in layers_of(subject, patterns) if layer.spatial]
    if not found:
        raise ValueError("no layer of this model has a map of positions; this probe needs a vision network")
    return found


def labels(layers: Sequence[Layer], axis: str) -> dict[str, tuple[Quantity, np.ndarray]]:
    """What every per-layer result says of its layers: name, kind, stage, depth, reduces."""
    dims = (axis,)
    return {
        "name": (Quantity("module", dims=dims), np.array([layer.name for layer in layers])),
        "kind": (Quantity("what the block computes", dims=dims), np.array([layer.kind for layer in layers])),
        "stage": (Quantity("stage", dims=dims), np.array([layer.stage for layer in layers])),
        "depth": (Quantity("normalised depth", dims=dims), np.array([layer.depth for layer in layers])),
        "reduces": (
            Quantity("1 where the map gets smaller", dims=dims),
            np.array([layer.reduces for layer in layers], dtype=np.uint8),
        ),
    }


def _layer(flow: Flow, residual: Residual) -> Layer:
    call = flow.operations[residual.position].call
    inside = [flow.operations[i] for i in residual.inside]
    kind = kind_of(inside)
    direct = direct_calls(flow, call, residual)
    shape = flow.shapes[residual.sum]
    layout, grid, prefix = layout_of(flow, residual.sum, starts_linear(inside, shape))
    block = flow.calls[call].module
    alone = sum(r.name in ADDITIONS and r.call == call and len(r.reads) == 2 for r in flow.operations) == 1
    tap, at_block = tap_of(flow, residual, call)
    name = branch_name(flow, direct, kind)
    if name is None or (at_block and alone and kind != "msa" and heavy_calls(flow, direct) > 1):
        name = block or (direct[-1].module if direct else tap.module)
    _, before, _ = layout_of(flow, residual.fork, starts_linear(inside, flow.shapes[residual.fork]))
    reduces = smaller(grid, before)
    branch = Branch(block, leaves(flow, residual), branch_end(residual, direct))
    attention = _attention(flow, residual.inside, grid, prefix)
    return Layer(name, kind, 0, 0.0, reduces, tap, shape[1:], layout, grid, prefix, branch, attention)


def _attention(flow: Flow, inside: Sequence[int], grid: tuple[int, int], prefix: int) -> Attention | None:
    """The first attention among some operations whose every query sees every key."""
    for operation in (flow.operations[i] for i in inside):
        if operation.name not in ATTENTION:
            continue
        shape = flow.shapes[operation.writes[0] if operation.name == "softmax" else operation.reads[0]]
        tokens = shape[0] if operation.name == "multi_head_attention_forward" else shape[-2]
        if operation.name == "softmax" and (len(shape) < 3 or shape[-1] != tokens):
            continue
        key = (operation.name, operation.number)
        if tokens == grid[0] * grid[1] + prefix:
            return Attention(key, operation.heads, grid, prefix)
        return Attention(key, operation.heads, window_of(flow, operation.reads[0], tokens), 0)
    return None


def _passage(flow: Flow, start: Node, end: Node, *, first: bool, example: Residual) -> list[Layer]:
    """What lies between two residual blocks: the stem before the first, pooling or patch merging later."""
    inside = [flow.operations[i] for i in flow.between(start, end)]
    linear = starts_linear([flow.operations[i] for i in example.inside], flow.shapes[example.fork])
    layers = []
    if first:
        pool = next((o for o in inside if o.name in POOLING), None)
        point = pool.reads[0] if pool else _entry(flow, example, end)
        heavy = next((o for o in inside if o.name in HEAVY), None)
        layers.append(_plain(flow, point, "stem", linear, flow.calls[heavy.call].module if heavy else ""))
        if pool is not None:
            layers.append(_plain(flow, pool.writes[0], "subsample", linear, flow.calls[pool.call].module))
    elif inside and smaller(layout_of(flow, end, linear)[1], layout_of(flow, start, linear)[1]):
        heavy = next((o for o in inside if o.name in HEAVY or o.name in POOLING), inside[-1])
        own = [c for c in flow.enclosing(heavy.call) if flow.calls[c].start >= flow.maker[start]]
        layers.append(_plain(flow, end, "subsample", linear, flow.calls[own[-1] if own else heavy.call].module))
    return [layer for layer in layers if layer is not None]


def _entry(flow: Flow, residual: Residual, end: Node) -> Node:
    """Where the stem ends: the input of the first block, also if it forks after a norm of its own."""
    block = flow.calls[flow.operations[residual.position].call]
    if block.reads and any(flow.operations[i].name in HEAVY for i in flow.between(0, block.reads[0])):
        return block.reads[0]
    return end


def _plain(flow: Flow, node: Node, kind: Kind, linear: bool, name: str) -> Layer:
    """A layer without a residual branch."""
    tap = None
    for call in flow.calls:
        if call.writes and call.writes[0] == node and call.module:
            tap = tap or Tap(call.module, "output", call.number)
    for call in flow.calls:
        if call.reads and call.reads[0] == node and call.module:
            tap = tap or Tap(call.module, "input", call.number)
    if tap is None:
        raise ValueError(
            f"the tensor after {name or 'the stem'} meets no module; name layers with --layers REGEX[:KIND]"
        )
    layout, grid, prefix = layout_of(flow, node, linear)
    shape = flow.shapes[node][1:]
    return Layer(name or tap.module, kind, 0, 0.0, kind == "subsample", tap, shape, layout, grid, prefix)


def _staged(layers: Sequence[Layer]) -> list[Layer]:
    """The same layers with stage and depth."""
    stage, staged = 0, []
    for i, layer in enumerate(layers):
        if layer.kind != "stem" and stage == 0 and layer.kind != "subsample":
            stage = 1
        elif layer.reduces and stage > 0:
            stage += 1
        staged.append(replace(layer, stage=stage, depth=i / max(len(layers) - 1, 1)))
    return staged


def _split(pattern: str) -> tuple[str, Kind | None]:
    expression, _, kind = pattern.rpartition(":")
    return (expression, kind) if expression and kind in get_args(Kind) else (pattern, None)  # type: ignore[return-value]


def _finish(flow: Flow, module: str) -> int:
    return next((call.stop for call in flow.calls if call.module == module), 0)

"""The layers of any vision network, found by what it does: points of its residual stream, their kind and grid.

Nothing is known by a model's name. One recorded forward pass shows every addition of two branches that start at a
common point; the longer branch is a residual block, attention or convolution decides its kind, and the sum is a point
of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from landscape.layers.graph import ATTENTION, Flow, Key, Node, record
from landscape.layers.residual_blocks import (
    ADDITIONS,
    HEAVY,
    POOLING,
    Kind,
    Layout,
    Residual,
    Tap,
    blocks_of,
    branch_end,
    branch_name,
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
    within,
)
from landscape.layers.sequential import parts
from landscape.layers.token_grid import Arrangement


@dataclass(frozen=True)
class Branch:
    """The residual branch that ends in a layer, or in a network without skips the stretch of modules that does.

    Args:
        block: dotted name of the module whose forward does the addition.
        leaves: calls of modules without children that the branch is made of, in order of execution.
        end: where the branch's contribution can be had last before the addition; None where no module makes it.
        skip: whether there is an addition.
    """

    block: str
    leaves: tuple[Tap, ...]
    end: Tap | None
    skip: bool = True


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
        fold: rows of the tensor's first axis per image, where windows stand beside each other there.
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
    fold: int = 1

    @property
    def spatial(self) -> bool:
        """Whether it has a map of positions."""
        return self.grid != (0, 0)

    @property
    def channels(self) -> int:
        """Length of its axis of channels."""
        return self.shape[0] if self.layout == "channels first" else self.shape[-1]

    def features(self, tensor: Tensor) -> Tensor:
        """The tensor without prefix tokens, its axes in whatever order they are, (N, ...)."""
        if self.fold > 1:
            return tensor.reshape(-1, self.fold, *tensor.shape[1:])
        return tensor[:, self.prefix :] if self.layout == "tokens" else tensor

    @property
    def unexplained(self) -> bool:
        """Whether it has tokens of which nobody knows where they lie."""
        return len(self.shape) > 1 and not self.spatial

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

    In a network without residual blocks those are the points after its convolutions, linear layers and poolings.

    Raises:
        ValueError: nothing of the kind can be seen; says what to do.
    """
    flow = record(model, example[:2])
    found = residuals(flow) or residuals(flow, least=2)
    if not found:
        return staged(_without_skips(flow))
    layers: list[Layer] = []
    position: Node = 0
    image = flow.shapes[0]
    lies = Arrangement((image[2], image[3]) if len(image) == 4 else (0, 0))
    for residual in found:
        passage = _passage(flow, position, residual.fork, first=not layers, example=residual)
        lies = lies.after(flow, position, residual.fork)
        layers += [_cut(layer) if lies.cut and layer.layout != "channels first" else layer for layer in passage]
        layer = _layer(flow, residual)
        layers.append(_cut(layer) if lies.cut else layer)
        position = residual.sum
        if not lies.cut and layer.spatial:
            lies = Arrangement(layer.grid)
    return staged(layers)


def _cut(layer: Layer) -> Layer:
    """A layer of which nobody knows where its positions lie."""
    attention = replace(layer.attention, sides=(0, 0), prefix=0) if layer.attention else None
    kind: Kind = "other" if layer.kind == "subsample" else layer.kind
    return replace(layer, kind=kind, grid=(0, 0), prefix=0, reduces=False, attention=attention)


def _layer(flow: Flow, residual: Residual) -> Layer:
    call = flow.operations[residual.position].call
    inside = [flow.operations[i] for i in residual.inside]
    kind = kind_of(inside)
    direct = direct_calls(flow, call, residual)
    tap, node, at_block = tap_of(flow, residual, call)
    shape = flow.shapes[node]
    layout, grid, prefix = layout_of(flow, node, starts_linear(inside, shape))
    block = flow.calls[call].module
    alone = sum(r.name in ADDITIONS and r.call == call and len(r.reads) == 2 for r in flow.operations) == 1
    name = branch_name(flow, direct, kind)
    if name is None or (at_block and alone and kind != "msa" and heavy_calls(flow, direct) > 1):
        name = block or (direct[-1].module if direct else tap.module)
    _, before, _ = layout_of(flow, residual.fork, starts_linear(inside, flow.shapes[residual.fork]))
    reduces = smaller(grid, before)
    branch = Branch(block, leaves(flow, residual), branch_end(residual, direct))
    attention = attention_of(flow, residual.inside, grid, prefix)
    fold = shape[0] // flow.shapes[0][0]
    return Layer(name, kind, 0, 0.0, reduces, tap, shape[1:], layout, grid, prefix, branch, attention, fold)


def attention_of(flow: Flow, inside: Sequence[int], grid: tuple[int, int], prefix: int) -> Attention | None:
    """The first attention among some operations whose every query sees every key."""
    for operation in (flow.operations[i] for i in inside):
        if operation.name not in ATTENTION:
            continue
        axis = 0 if operation.name == "multi_head_attention_forward" else -2  # of tokens
        shapes = [flow.shapes[node] for node in operation.reads[:2]]
        if operation.name == "softmax":
            if len(shapes[0]) < 3 or shapes[0][-1] != shapes[0][-2]:
                continue
        elif shapes[0][axis] != shapes[-1][axis]:
            continue
        tokens = shapes[0][axis]
        key = (operation.name, operation.number)
        if tokens == grid[0] * grid[1] + prefix:
            return Attention(key, operation.heads, grid, prefix)
        return Attention(key, operation.heads, window_of(flow, operation.reads[0], tokens), 0)
    return None


def _without_skips(flow: Flow) -> list[Layer]:
    layers: list[Layer] = []
    for part in parts(flow):
        tap, node = next(((tap, node) for node in part.nodes if (tap := _met(flow, node)) is not None), (None, 0))
        if tap is None:
            continue
        name = part.name or tap.module
        layout, grid, prefix = layout_of(flow, node, part.last_axis)
        attention = None
        if part.kind == "msa":
            attention = attention_of(
                flow, range(flow.maker[part.nodes[-1]], flow.maker[part.nodes[-1]] + 1), grid, prefix
            )
        layer = Layer(name, part.kind, 0, 0.0, False, tap, flow.shapes[node][1:], layout, grid, prefix)
        reduces = bool(layers) and smaller(grid, layers[-1].grid)
        branch = Branch("", part.leaves, None, skip=False)
        layers.append(replace(layer, reduces=reduces, branch=branch, attention=attention))
    if not layers:
        raise ValueError(
            "no residual block, convolution or linear layer was found before the last one of this model; "
            "name the modules to listen to with --layers REGEX[:KIND]"
        )
    return layers


def _passage(flow: Flow, start: Node, end: Node, *, first: bool, example: Residual) -> list[Layer]:
    """What lies between two residual blocks: the stem before the first, pooling, patch merging, blocks without skip."""
    inside = [flow.operations[i] for i in flow.between(start, end)]
    linear = starts_linear([flow.operations[i] for i in example.inside], flow.shapes[example.fork])
    blocks = blocks_of(flow, start, end)
    layers = []
    if first:
        pool = next((o for o in inside if o.name in POOLING and _shrinks(flow, o.reads[0], o.writes[0], linear)), None)
        point = pool.reads[0] if pool else _entry(flow, example, end)
        heavy = next((o for o in inside if o.name in HEAVY), None)
        blocks = [block for block in blocks if heavy and flow.calls[block].start > inside.index(heavy)]
        if blocks and pool is None:
            point = flow.calls[blocks[0]].reads[0]
        layers.append(_plain(flow, point, "stem", linear, flow.calls[heavy.call].module if heavy else ""))
        if pool is not None:
            layers.append(_plain(flow, pool.writes[0], "subsample", linear, flow.calls[pool.call].module))
    elif not blocks and inside and _shrinks(flow, start, end, linear):
        heavy = next((o for o in inside if o.name in HEAVY or o.name in POOLING), inside[-1])
        own = [c for c in flow.enclosing(heavy.call) if within(flow, flow.calls[c], start, end)]
        layers.append(_plain(flow, end, "subsample", linear, flow.calls[own[-1] if own else heavy.call].module))
    for block in blocks:
        call = flow.calls[block]
        operations = flow.operations[call.start : call.stop]
        last = [operation for operation in operations if operation.weight][-1].name == "linear"
        layer = _plain(flow, call.writes[0], kind_of(operations), last, call.module)
        layers.append(replace(layer, reduces=_shrinks(flow, call.reads[0], call.writes[0], last)))
    return layers


def _shrinks(flow: Flow, before: Node, after: Node, linear: bool) -> bool:
    """Whether a map gets smaller between two nodes."""
    one, other = flow.shapes[before], flow.shapes[after]
    if math.prod(one) == math.prod(other) and {one[1], one[-1]} & {other[1], other[-1]}:
        return False  # as many numbers in as many channels: the same map in another order
    return smaller(layout_of(flow, after, linear)[1], layout_of(flow, before, linear)[1])


def _entry(flow: Flow, residual: Residual, end: Node) -> Node:
    """Where the stem ends: the input of the first block, also if it forks after a norm of its own."""
    block = flow.calls[flow.operations[residual.position].call]
    if block.reads and any(flow.operations[i].name in HEAVY for i in flow.between(0, block.reads[0])):
        return block.reads[0]
    return end


def _plain(flow: Flow, node: Node, kind: Kind, linear: bool, name: str) -> Layer:
    """A layer without a residual branch."""
    tap = _met(flow, node)
    if tap is None:
        raise ValueError(
            f"the tensor after {name or 'the stem'} meets no module; name layers with --layers REGEX[:KIND]"
        )
    layout, grid, prefix = layout_of(flow, node, linear)
    shape = flow.shapes[node][1:]
    return Layer(name or tap.module, kind, 0, 0.0, kind == "subsample", tap, shape, layout, grid, prefix)


def _met(flow: Flow, node: Node) -> Tap | None:
    """The first module that returns a tensor, or else takes it in."""
    for call in flow.calls:
        if call.writes and call.writes[0] == node and call.module:
            return Tap(call.module, "output", call.number)
    for call in flow.calls:
        if call.reads and call.reads[0] == node and call.module:
            return Tap(call.module, "input", call.number)
    return None


def staged(layers: Sequence[Layer]) -> list[Layer]:
    """The same layers with stage and depth."""
    stage, staged = 0, []
    for i, layer in enumerate(layers):
        if layer.kind != "stem" and stage == 0 and layer.kind != "subsample":
            stage = 1
        elif layer.reduces and stage > 0:
            stage += 1
        staged.append(replace(layer, stage=stage, depth=i / max(len(layers) - 1, 1)))
    return staged

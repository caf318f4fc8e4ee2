"""The layers of any vision network, found by what it does: points of its residual stream, their kind and grid.

Nothing is known by a model's name. One recorded forward pass shows every addition of two branches that start at a
common point; the longer branch is a residual block, attention or convolution decides its kind, and the sum is a point
of the residual stream.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from torch import Tensor, nn

from landscape.dataflow import Call, Flow, Node, Operation, record
from landscape.probe import Quantity
from landscape.subject import Subject

Kind = Literal["stem", "conv", "msa", "mlp", "subsample", "head", "other"]
Layout = Literal["channels first", "channels last", "tokens", "none"]

ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
ATTENTION = {"scaled_dot_product_attention", "softmax", "_softmax", "multi_head_attention_forward"}
HEAVY = {
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "matmul",
    "__matmul__",
    "bmm",
    "einsum",
    "baddbmm",
    *ATTENTION,
}
PREFIX = 16  # at most that many tokens (class, registers, distillation) come before those of the grid
POOLING = {"max_pool2d", "avg_pool2d", "boolean_dispatch", "max_pool2d_with_indices", "fractional_max_pool2d"}


@dataclass(frozen=True)
class Tap:
    """Where to listen: the first tensor given to, or returned by, one call of a module."""

    module: str
    side: Literal["input", "output"]
    call: int = 0


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
    found = _residuals(flow)
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
            raise ValueError(f"--layers {pattern} is no regular expression ({error})") from None
        if not matching:
            near = difflib.get_close_matches(expression, names, 3, 0.3) or names[:3]
            raise ValueError(f"--layers {pattern} matches no module; near names are {', '.join(near)}")
        kinds.update(dict.fromkeys(matching, kind))
    layers = []
    for call in flow.calls:
        if call.module in kinds and call.number == 0 and call.writes:
            own = known.get(call.module)
            shape = flow.shapes[call.writes[0]][1:]
            layout, grid, prefix = _layout(flow, call.writes[0], _consumer_is_linear(flow, call.writes[0]))
            kind = kinds[call.module] or (own.kind if own else "other")
            tap = Tap(call.module, "output")
            layers.append(Layer(call.module, kind, 0, 0.0, False, tap, shape, layout, grid, prefix))
    if not layers:
        raise ValueError("the modules that --layers names are not called in a forward pass; choose others")
    layers.sort(key=lambda layer: _finish(flow, layer.name))
    grids = [layer.grid for layer in layers]
    return _staged(
        [
            replace(layer, reduces=_smaller(layer.grid, before))
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


@contextmanager
def listening(model: nn.Module, layers: Sequence[Layer], receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hand each layer's tensor to `receive(position, tensor)` while the model runs; nothing is kept.

    Hooks are removed afterwards, also after an exception.
    """
    modules = dict(model.named_modules())
    counts: dict[tuple[str, str], int] = {}
    wanted: dict[tuple[str, str], dict[int, list[int]]] = {}
    for position, layer in enumerate(layers):
        key: tuple[str, str] = (layer.tap.module, layer.tap.side)
        wanted.setdefault(key, {}).setdefault(layer.tap.call, []).append(position)

    def give(key: tuple[str, str], value: object) -> None:
        number = counts[key] = counts.get(key, -1) + 1
        tensor = value[0] if isinstance(value, tuple | list) else value
        for position in wanted[key].get(number, []):
            assert isinstance(tensor, Tensor)
            receive(position, tensor)

    handles = [model.register_forward_pre_hook(lambda module, args: counts.clear())]
    for key in wanted:
        module, side = modules[key[0]], key[1]
        if side == "input":
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, key=key: give(key, args or tuple(kwargs.values())),
                    with_kwargs=True,
                )
            )
        else:
            handles.append(module.register_forward_hook(lambda module, args, output, key=key: give(key, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


@dataclass(frozen=True)
class _Residual:
    """stream = skip(fork) + branch(fork)."""

    position: int  # of the addition among the operations
    fork: Node
    end: Node  # of the branch, just before the addition
    sum: Node
    inside: tuple[int, ...]  # operations of the branch


def _residuals(flow: Flow) -> list[_Residual]:
    """Additions of two branches with a common start, outermost ones only, in order."""
    candidates = []
    for position, operation in enumerate(flow.operations):
        if operation.name not in ADDITIONS or len(operation.reads) != 2:
            continue
        left, right = operation.reads
        shape = flow.shapes[left]
        if flow.shapes[right] != shape or len(shape) < 3:
            continue
        fork = (flow.ancestors[left] & flow.ancestors[right]).bit_length() - 1
        ways = [(flow.between(fork, end), end) for end in (left, right)]
        heavy = [sum(flow.operations[i].name in HEAVY for i in way) for way, _ in ways]
        if max(heavy) == 0:
            continue
        inside, end = ways[0] if heavy[0] > heavy[1] else ways[1]
        candidates.append(_Residual(position, fork, end, operation.writes[0], tuple(inside)))
    nested = {r.position for outer in candidates for r in candidates if r.position in outer.inside}
    return [r for r in candidates if r.position not in nested]


def _layer(flow: Flow, residual: _Residual) -> Layer:
    call = flow.operations[residual.position].call
    inside = [flow.operations[i] for i in residual.inside]
    kind = _kind(inside)
    direct = _direct_calls(flow, call, residual)
    shape = flow.shapes[residual.sum]
    layout, grid, prefix = _layout(flow, residual.sum, _starts_linear(inside, shape))
    block = flow.calls[call].module
    alone = sum(r.name in ADDITIONS and r.call == call and len(r.reads) == 2 for r in flow.operations) == 1
    tap, at_block = _tap(flow, residual, call)
    name = _branch_name(flow, direct, kind)
    if name is None or (at_block and alone and kind != "msa" and _heavy_calls(flow, direct) > 1):
        name = block or (direct[-1].module if direct else tap.module)
    _, before, _ = _layout(flow, residual.fork, _starts_linear(inside, flow.shapes[residual.fork]))
    reduces = _smaller(grid, before)
    branch = Branch(block, _leaves(flow, residual), _branch_end(residual, direct))
    return Layer(name, kind, 0, 0.0, reduces, tap, shape[1:], layout, grid, prefix, branch)


def _kind(inside: Sequence[Operation]) -> Kind:
    if any(operation.name in ATTENTION for operation in inside):
        return "msa"
    if any(operation.name.startswith("conv") and max(operation.weight[2:], default=1) > 1 for operation in inside):
        return "conv"
    return "mlp"


def _direct_calls(flow: Flow, block: int, residual: _Residual) -> list[Call]:
    """Module calls made directly by the block's forward that belong to the branch alone."""
    inside = set(residual.inside)
    return [
        call
        for call in flow.calls
        if call.parent == block
        and call.start < residual.position
        and (
            any(i in inside for i in range(call.start, call.stop))
            or (call.start == call.stop and call.writes and flow.maker[call.writes[0]] in inside)  # an identity
        )
    ]


def _leaves(flow: Flow, residual: _Residual) -> tuple[Tap, ...]:
    inside, parents = set(residual.inside), {call.parent for call in flow.calls}
    return tuple(
        Tap(call.module, "output", call.number)
        for position, call in enumerate(flow.calls)
        if position not in parents and any(i in inside for i in range(call.start, call.stop))
    )


def _branch_end(residual: _Residual, direct: Sequence[Call]) -> Tap | None:
    """The last module to touch the branch; what follows it (a learnt scale) keeps zeros zero."""
    makers = [call for call in direct if residual.end in call.writes] or list(direct)
    return Tap(makers[-1].module, "output", makers[-1].number) if makers else None


def _heavy_calls(flow: Flow, calls: Sequence[Call]) -> int:
    return sum(any(flow.operations[i].name in HEAVY for i in range(c.start, c.stop)) for c in calls)


def _branch_name(flow: Flow, direct: Sequence[Call], kind: Kind) -> str | None:
    """The module whose output is added: the one that attends, else the last one with weights of its own."""

    def does(call: Call, names: set[str]) -> bool:
        return any(flow.operations[i].name in names for i in range(call.start, call.stop))

    if kind == "msa":
        return next((call.module for call in direct if does(call, ATTENTION)), None)
    return next((call.module for call in reversed(direct) if does(call, HEAVY)), None)


def _tap(flow: Flow, residual: _Residual, call: int) -> tuple[Tap, bool]:
    """Where the sum can be had: at the block's output if it ends there, else where the next module takes it in."""
    block = flow.calls[call]
    later = [
        flow.operations[i]
        for i in range(residual.position + 1, block.stop)
        if flow.operations[i].name in HEAVY or flow.operations[i].name in ADDITIONS
    ]
    shape = flow.shapes[residual.sum]
    if block.module and block.writes and flow.shapes[block.writes[0]] == shape and not later:
        return Tap(block.module, "output", block.number), True
    for consumer in flow.calls:
        if consumer.reads and consumer.reads[0] == residual.sum:
            return Tap(consumer.module, "input", consumer.number), False
    for maker in flow.calls:
        if maker.writes and maker.writes[0] == residual.sum:
            return Tap(maker.module, "output", maker.number), False
    raise ValueError(
        f"the sum after {block.module or 'the model'} meets no module; name layers with --layers REGEX[:KIND]"
    )


def _passage(flow: Flow, start: Node, end: Node, *, first: bool, example: _Residual) -> list[Layer]:
    """What lies between two residual blocks: the stem before the first, pooling or patch merging later."""
    inside = [flow.operations[i] for i in flow.between(start, end)]
    linear = _starts_linear([flow.operations[i] for i in example.inside], flow.shapes[example.fork])
    layers = []
    if first:
        pool = next((o for o in inside if o.name in POOLING), None)
        point = pool.reads[0] if pool else _entry(flow, example, end)
        heavy = next((o for o in inside if o.name in HEAVY), None)
        layers.append(_plain(flow, point, "stem", linear, flow.calls[heavy.call].module if heavy else ""))
        if pool is not None:
            layers.append(_plain(flow, pool.writes[0], "subsample", linear, flow.calls[pool.call].module))
    elif inside and _smaller(_layout(flow, end, linear)[1], _layout(flow, start, linear)[1]):
        heavy = next((o for o in inside if o.name in HEAVY or o.name in POOLING), inside[-1])
        own = [c for c in flow.enclosing(heavy.call) if flow.calls[c].start >= flow.maker[start]]
        layers.append(_plain(flow, end, "subsample", linear, flow.calls[own[-1] if own else heavy.call].module))
    return [layer for layer in layers if layer is not None]


def _entry(flow: Flow, residual: _Residual, end: Node) -> Node:
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
    layout, grid, prefix = _layout(flow, node, linear)
    shape = flow.shapes[node][1:]
    return Layer(name or tap.module, kind, 0, 0.0, kind == "subsample", tap, shape, layout, grid, prefix)


def _starts_linear(inside: Sequence[Operation], shape: tuple[int, ...]) -> bool:
    """Whether the first weight on the branch acts on the last axis."""
    first = next((o for o in inside if o.weight), None)
    return bool(first and first.name == "linear" and first.weight[1] == shape[-1])


def _consumer_is_linear(flow: Flow, node: Node) -> bool:
    first = next((o for o in flow.operations if node in o.reads and (o.weight or o.name == "layer_norm")), None)
    return bool(first and not first.name.startswith("conv"))


def _layout(flow: Flow, node: Node, linear: bool) -> tuple[Layout, tuple[int, int], int]:
    """Layout, grid and number of prefix tokens of a tensor."""
    shape = flow.shapes[node]
    if len(shape) == 4:
        return ("channels last", (shape[1], shape[2]), 0) if linear else ("channels first", (shape[2], shape[3]), 0)
    if len(shape) == 3:
        # The grid the tokens come from is the map before them that fits best, the latest of several.
        fitting = [
            (shape[1] - grid[0] * grid[1], -earlier, grid)
            for earlier in range(node)
            if flow.ancestors[node] >> earlier & 1
            for grid in _grids(flow, earlier, shape[2])
            if grid[0] * grid[1] > 1 and 0 <= shape[1] - grid[0] * grid[1] <= PREFIX
        ]
        if fitting:
            prefix, _, grid = min(fitting)
            return "tokens", grid, prefix
    return "none", (0, 0), 0


def _grids(flow: Flow, node: Node, features: int) -> Iterator[tuple[int, int]]:
    """Sides of a tensor as a map of tokens with that many features; attention's (head, width) is none."""
    shape, maker = flow.shapes[node], flow.maker[node]
    name = flow.operations[maker].name if maker >= 0 else ""
    if len(shape) == 4 and (name.startswith("conv") or name in POOLING):
        yield shape[2], shape[3]
    elif len(shape) == 6 or (len(shape) == 4 and shape[3] == features and min(shape[1:3]) > 1):
        yield shape[1], shape[2]  # (batch, row, column, ...): a patch or the features


def _smaller(grid: tuple[int, int], before: tuple[int, int]) -> bool:
    return 0 < grid[0] * grid[1] < before[0] * before[1]


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

"""Residual branches in a recorded pass: where they fork and end, what they compute, how their tensors lie.

A residual block is an addition of two branches that start at a common node; the branch that does the work is the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from landscape.layers.graph import ATTENTION, Call, Flow, Node, Operation

Kind = Literal["stem", "conv", "msa", "mlp", "subsample", "head", "other"]
Layout = Literal["channels first", "channels last", "tokens", "none"]
Grid = tuple[int, int]  # (rows, columns) of positions

ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
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
VIEWS = {"reshape", "view", "flatten", "permute", "transpose", "contiguous", "unflatten"}
POOLING = {"max_pool2d", "avg_pool2d", "boolean_dispatch", "max_pool2d_with_indices", "fractional_max_pool2d"}


@dataclass(frozen=True)
class Tap:
    """Where to listen: the first tensor given to, or returned by, one call of a module."""

    module: str
    side: Literal["input", "output"]
    call: int = 0


@dataclass(frozen=True)
class Residual:
    """stream = skip(fork) + branch(fork)."""

    position: int  # of the addition among the operations
    fork: Node
    end: Node  # of the branch, just before the addition
    sum: Node
    inside: tuple[int, ...]  # operations of the branch


def residuals(flow: Flow, least: int = 3) -> list[Residual]:
    """Additions of two branches with a common start, outermost ones only, in order, of tensors of at least some axes.

    Where there are blocks on maps or tokens (3), what is added without them is a score.
    """
    candidates = []
    for position, operation in enumerate(flow.operations):
        if operation.name not in ADDITIONS or len(operation.reads) != 2:
            continue
        left, right = operation.reads
        shape = flow.shapes[left]
        if flow.shapes[right] != shape or len(shape) < least:
            continue
        fork = (flow.ancestors[left] & flow.ancestors[right]).bit_length() - 1
        ways = [(flow.between(fork, end), end) for end in (left, right)]
        heavy = [sum(flow.operations[i].name in HEAVY for i in way) for way, _ in ways]
        if max(heavy) == 0:
            continue
        inside, end = ways[0] if heavy[0] > heavy[1] else ways[1]
        candidates.append(Residual(position, fork, end, operation.writes[0], tuple(inside)))
    nested = {r.position for outer in candidates for r in candidates if r.position in outer.inside}
    return [r for r in candidates if r.position not in nested]


def kind_of(inside: Sequence[Operation]) -> Kind:
    """What a branch computes, from its operations."""
    if any(operation.name in ATTENTION for operation in inside):
        return "msa"
    if any(operation.name.startswith("conv") and max(operation.weight[2:], default=1) > 1 for operation in inside):
        return "conv"
    return "mlp"


def direct_calls(flow: Flow, block: int, residual: Residual) -> list[Call]:
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


def within(flow: Flow, call: Call, start: Node, end: Node) -> bool:
    """Whether a module call lies on the way from one node to a later one as a whole."""
    return flow.maker[start] < call.start and call.stop <= flow.maker[end] + 1


def blocks_of(flow: Flow, start: Node, end: Node) -> list[int]:
    """Calls between two nodes that do what a residual block does, without a skip: several weights one after the other.

    As the first block of a stage of an EfficientNet. A module that only holds such blocks stands for them, not itself.
    """
    found: list[int] = []

    def visit(position: int) -> None:
        call = flow.calls[position]
        inner = [i for i, c in enumerate(flow.calls) if c.parent == position and heavy_calls(flow, [c])]
        many = [i for i in inner if _weights(flow, flow.calls[i]) > 1]
        if many and (len(inner) == 1 or len(many) == len(inner)):
            for i in inner:
                visit(i)
        elif call.reads and call.writes:
            found.append(position)

    for position, call in enumerate(flow.calls):
        alone = within(flow, call, start, end) and not (
            call.parent >= 0 and within(flow, flow.calls[call.parent], start, end)
        )
        if alone and call.module and _weights(flow, call) > 1 and flow.ancestors[end] >> (call.writes or (end,))[0] & 1:
            visit(position)
    return found


def _weights(flow: Flow, call: Call) -> int:
    """How many layers with weights lie between what a call is given and what it returns, one after the other.

    Those side by side count once: a transition with a convolution for the map and a linear layer for the class token.
    """
    if not (call.reads and call.writes):
        return 0
    depths: dict[int, int] = {}
    for i in flow.between(call.reads[0], call.writes[0]):
        operation = flow.operations[i]
        if operation.weight:
            before = [
                depth
                for j, depth in depths.items()
                if any(flow.ancestors[read] >> flow.operations[j].writes[0] & 1 for read in operation.reads)
            ]
            depths[i] = 1 + max(before, default=0)
    return max(depths.values(), default=0)


def leaves(flow: Flow, residual: Residual) -> tuple[Tap, ...]:
    """Calls of modules without children that a branch is made of, in order of execution."""
    inside, parents = set(residual.inside), {call.parent for call in flow.calls}
    return tuple(
        Tap(call.module, "output", call.number)
        for position, call in enumerate(flow.calls)
        if position not in parents and any(i in inside for i in range(call.start, call.stop))
    )


def branch_end(residual: Residual, direct: Sequence[Call]) -> Tap | None:
    """The last module to touch the branch; what follows it (a learnt scale) keeps zeros zero."""
    makers = [call for call in direct if residual.end in call.writes] or list(direct)
    return Tap(makers[-1].module, "output", makers[-1].number) if makers else None


def heavy_calls(flow: Flow, calls: Sequence[Call]) -> int:
    """How many of the calls hold weights or products."""
    return sum(any(flow.operations[i].name in HEAVY for i in range(c.start, c.stop)) for c in calls)


def branch_name(flow: Flow, direct: Sequence[Call], kind: Kind) -> str | None:
    """The module whose output is added: the one that attends, else the last one with weights of its own."""

    def does(call: Call, names: set[str]) -> bool:
        return any(flow.operations[i].name in names for i in range(call.start, call.stop))

    if kind == "msa":
        return next((call.module for call in direct if does(call, ATTENTION)), None)
    return next((call.module for call in reversed(direct) if does(call, HEAVY)), None)


def tap_of(flow: Flow, residual: Residual, call: int) -> tuple[Tap, Node, bool]:
    """Where the sum can be had: at the block's output if it ends there, else where the next module takes it in.

    With the tensor that is had there, the sum itself or a view of it, and whether that is at the block's output.
    """
    block = flow.calls[call]
    later = [
        flow.operations[i]
        for i in range(residual.position + 1, block.stop)
        if flow.operations[i].name in HEAVY or flow.operations[i].name in ADDITIONS
    ]
    shape = flow.shapes[residual.sum]
    if block.module and block.writes and flow.shapes[block.writes[0]] == shape and not later:
        return Tap(block.module, "output", block.number), residual.sum, True
    views = [residual.sum]
    for operation in flow.operations[residual.position + 1 :]:
        if operation.name in VIEWS and operation.reads == (views[-1],):
            views.append(operation.writes[0])
    for node in views:
        for consumer in flow.calls:
            if consumer.reads and consumer.reads[0] == node:
                return Tap(consumer.module, "input", consumer.number), node, False
        for maker in flow.calls:
            if maker.writes and maker.writes[0] == node:
                return Tap(maker.module, "output", maker.number), node, False
    raise ValueError(
        f"the sum after {block.module or 'the model'} meets no module; name layers with --layers REGEX[:KIND]"
    )


def starts_linear(inside: Sequence[Operation], shape: tuple[int, ...]) -> bool:
    """Whether the first weight on the branch acts on the last axis."""
    first = next((o for o in inside if o.weight), None)
    return bool(first and first.name == "linear" and first.weight[1] == shape[-1])


def consumer_is_linear(flow: Flow, node: Node) -> bool:
    """Whether what first takes a tensor in acts on its last axis."""
    first = next((o for o in flow.operations if node in o.reads and (o.weight or o.name == "layer_norm")), None)
    return bool(first and not first.name.startswith("conv"))


def layout_of(flow: Flow, node: Node, linear: bool) -> tuple[Layout, tuple[int, int], int]:
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
        for earlier in range(node - 1, -1, -1):  # patches that were merged while they still had rows and columns
            sides = flow.shapes[earlier][1:3]
            lies = flow.ancestors[node] >> earlier & 1 and len(flow.shapes[earlier]) == 4
            if lies and min(sides) > 1 and sides[0] * sides[1] == shape[1]:
                return "tokens", (sides[0], sides[1]), 0
    return "none", (0, 0), 0


def _grids(flow: Flow, node: Node, features: int) -> Iterator[tuple[int, int]]:
    """Sides of a tensor as a map of tokens with that many features; attention's (head, width) is none."""
    shape, maker = flow.shapes[node], flow.maker[node]
    name = flow.operations[maker].name if maker >= 0 else ""
    if len(shape) == 4 and (name.startswith("conv") or name in POOLING):
        yield shape[2], shape[3]
    elif len(shape) == 6 or (len(shape) == 4 and shape[3] == features and min(shape[1:3]) > 1):
        yield shape[1], shape[2]  # (batch, row, column, ...): a patch or the features


def window_of(flow: Flow, node: Node, tokens: int) -> tuple[int, int]:
    """Sides of the windows that a map was cut into, by the reshape (..., rows, side, columns, side, ...)."""
    for earlier in range(node, -1, -1):
        shape = flow.shapes[earlier]
        if flow.ancestors[node] >> earlier & 1 and len(shape) >= 6:
            for i in range(2, len(shape) - 2):
                if shape[i] * shape[i + 2] == tokens:
                    return shape[i], shape[i + 2]
    return (0, 0)


def smaller(grid: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether one grid has fewer positions than the grid before it."""
    return 0 < grid[0] * grid[1] < before[0] * before[1]

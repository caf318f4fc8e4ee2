"""Find the residual blocks of a recorded pass, and the module calls and kinds of their branches.

A residual block is an addition of two branches that start at a common node; the branch with the heavy operations is
the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import or_

from landscape.discovery.attention import attends, sums_over_positions
from landscape.discovery.graph import ADDITIONS, ATTENTION, HEAVY, VIEWS, Call, Flow, Node
from landscape.discovery.layer import Kind, Tap
from landscape.discovery.positions import PRODUCTS

JOINING = {"cat", "concat", "concatenate"}


@dataclass(frozen=True)
class Residual:
    """stream = skip(fork) + branch(fork)."""

    position: int  # of the addition among the operations
    fork: Node
    end: Node  # of the branch, just before the addition
    sum: Node
    inside: tuple[int, ...]  # operations of the branch


def residuals(flow: Flow, least: int = 3) -> list[Residual]:
    """Additions of two branches with a common start, outermost ones only, in order of execution.

    The sums have at least `least` axes, 3 for maps or tokens: where there are such blocks, sums with fewer are scores.
    """
    found: list[_Sum] = []
    for position, operation in enumerate(flow.operations):
        if operation.name not in ADDITIONS or len(operation.reads) != 2:
            continue
        left, right = operation.reads
        shape = flow.shapes[left]
        if flow.shapes[right] != shape or len(shape) < least:
            continue
        fork = (flow.ancestors[left] & flow.ancestors[right]).bit_length() - 1
        if fork < 0:  # of two inputs, as the embeddings of tokens and of given positions
            continue
        branches = flow.between(fork, left), flow.between(fork, right)
        blurred = [any(flow.operations[i].blurs for i in branch) for branch in branches]  # both: a cell of poolings
        if any(flow.operations[i].name in HEAVY for i in chain(*branches)) or sum(blurred) == 1:
            held = [[s for s in found if s.position in branch] for branch in branches]
            around = not all(any(not s.joins for s in several) for several in held)
            around &= not all(branches) or all(flow.ancestors[s.fork] >> fork & 1 for s in chain(*held))
            found.append(_Sum(position, fork, operation.writes[0], branches, joins=not around))
    outermost = _outermost(flow, found)
    return [block for s in outermost if (block := _block(flow, s, outermost)) is not None]


@dataclass(frozen=True)
class _Sum:
    """A sum of two branches that start at a node."""

    position: int  # of the addition among the operations
    fork: Node
    sum: Node
    branches: tuple[list[int], list[int]]  # operations between the fork and either summand
    # Whether it is no block around those on its branches: both have some, as of two sizes, or one starts before.
    joins: bool


def _outermost(flow: Flow, sums: Sequence[_Sum]) -> list[_Sum]:
    """The sums that are no part of a branch of another one, on which a part starts and ends."""
    found: list[_Sum] = []
    for inner in reversed(sums):
        around = [o for o in found if not o.joins and any(inner.position in branch for branch in o.branches)]
        if not any(inner.joins or flow.ancestors[inner.fork] >> outer.fork & 1 for outer in around):
            found.append(inner)
    return found[::-1]


def _block(flow: Flow, own: _Sum, sums: Sequence[_Sum]) -> Residual | None:
    """The block that ends in a sum: the branch with the heavy operations, after the blocks that it runs through."""
    branches = []
    for branch in own.branches:
        past = reduce(or_, (flow.ancestors[other.sum] for other in sums if other.position in branch), 0)
        branches.append([i for i in branch if not past >> flow.operations[i].writes[0] & 1])
    several = [[flow.operations[i] for i in branch] for branch in branches]
    heavy = [(sum(o.name in HEAVY for o in branch), any(o.blurs for o in branch)) for branch in several]
    side = 0 if heavy[0] > heavy[1] else 1
    end = flow.operations[own.position].reads[side]
    return Residual(own.position, own.fork, end, own.sum, tuple(branches[side])) if any(heavy[side]) else None


def side_by_side(flow: Flow, positions: Sequence[int]) -> list[Call]:
    """Calls of several networks on the same input that all the operations at `positions` lie in, as of a deep ensemble.

    None if there is one network. Their outputs are scores (N, classes) of one shape.
    """
    found: dict[tuple[Node, ...], list[Call]] = {}
    for call in flow.calls[1:]:
        inside = any(call.start <= position < call.stop for position in positions)
        scores = len(call.writes) == 1 and len(flow.shapes[call.writes[0]]) == 2
        if inside and scores and call.reads:
            found.setdefault((*call.reads, -1, *flow.shapes[call.writes[0]]), []).append(call)
    for calls in found.values():
        outer = [call for call in calls if not any(o is not call and o.start <= call.start < o.stop for o in calls)]
        if len({call.module for call in outer}) > 1 and all(
            any(call.start <= position < call.stop for call in outer) for position in positions
        ):
            return outer
    return []


def kind_of(flow: Flow, inside: Sequence[int]) -> Kind:
    """The kind of a branch, from its operations."""
    operations = [flow.operations[i] for i in inside]
    if any(attends(flow, i, inside) or sums_over_positions(flow, flow.operations[i]) for i in inside):
        return "msa"
    if any(operation.name.startswith("conv") and max(operation.weight[2:], default=1) > 1 for operation in operations):
        return "conv"
    return "mlp" if any(operation.name in HEAVY for operation in operations) else "other"


def direct_calls(flow: Flow, block: int, residual: Residual) -> list[Call]:
    """Calls by the block's forward itself of modules on the branch."""
    inside = set(residual.inside)

    def on_branch(call: Call) -> bool:
        if call.start == call.stop:  # an identity
            return bool(call.writes) and flow.maker[call.writes[0]] in inside
        return not inside.isdisjoint(range(call.start, call.stop))

    direct = (call for call in flow.calls if call.parent == block and call.start < residual.position)
    return [call for call in direct if on_branch(call)]


def lies_between(flow: Flow, call: Call, start: Node, end: Node) -> bool:
    """Whether the whole of a module call lies between one node and a later one."""
    return flow.maker[start] < call.start and call.stop <= flow.maker[end] + 1


def blocks_without_skip(flow: Flow, start: Node, end: Node) -> list[int]:
    """Calls between two nodes that would be residual blocks if they had a skip: several weights in sequence.

    For example the first block of a stage of an EfficientNet. A module that only contains such blocks is replaced by
    them.
    """
    found: list[int] = []

    def visit(position: int) -> None:
        call = flow.calls[position]
        inner = [i for i, c in enumerate(flow.calls) if c.parent == position and count_heavy(flow, [c])]
        many = [i for i in inner if _weights(flow, flow.calls[i]) > 1]
        if many and (len(inner) == 1 or len(many) == len(inner)):
            for i in inner:
                visit(i)
        elif call.reads and call.writes:
            found.append(position)

    for position, call in enumerate(flow.calls):
        inner = call.parent >= 0 and lies_between(flow, flow.calls[call.parent], start, end)
        outermost = lies_between(flow, call, start, end) and not inner
        output = call.writes[0] if call.writes else end
        if outermost and call.module and _weights(flow, call) > 1 and flow.ancestors[end] >> output & 1:
            visit(position)
    return found


def blocks_behind(flow: Flow, start: Node, end: Node) -> list[int]:
    """`blocks_without_skip` with a convolution of neighbours, before a later weight: the last of a MobileNet-V2.

    What holds the last weight is the head.
    """
    inside = flow.between(start, end)
    last = max((i for i in inside if flow.operations[i].weight), default=-1)
    blocks = (flow.calls[position] for position in blocks_without_skip(flow, start, end))
    return [
        flow.calls.index(call)
        for call in blocks
        if call.stop <= last and kind_of(flow, range(call.start, call.stop)) == "conv"
    ]


def _weights(flow: Flow, call: Call) -> int:
    """Length of the longest sequence of weights between the input of a call and its output.

    Parallel ones count once: a transition with a convolution for the map and a linear layer for the class token.
    """
    if not (call.reads and call.writes):
        return 0
    depths: dict[Node, int] = {}  # of the outputs of weights
    for operation in (flow.operations[i] for i in flow.between(call.reads[0], call.writes[0])):
        if operation.weight:
            past = reduce(or_, (flow.ancestors[read] for read in operation.reads))
            depths[operation.writes[0]] = 1 + max((d for node, d in depths.items() if past >> node & 1), default=0)
    return max(depths.values(), default=0)


def leaves(flow: Flow, residual: Residual) -> tuple[Tap, ...]:
    """Calls of the branch's modules without children, in order of execution."""
    inside, parents = set(residual.inside), {call.parent for call in flow.calls}
    return tuple(
        Tap(call.module, "output", call.number)
        for position, call in enumerate(flow.calls)
        if position not in parents and not inside.isdisjoint(range(call.start, call.stop))
    )


def branch_end(residual: Residual, direct: Sequence[Call]) -> Tap | None:
    """The last module call on the branch; what follows it (a learnt scale) maps zeros to zeros."""
    makers = [call for call in direct if residual.end in call.writes] or list(direct)
    return Tap(makers[-1].module, "output", makers[-1].number) if makers else None


def _contains(flow: Flow, call: Call, names: set[str]) -> bool:
    return any(operation.name in names for operation in flow.operations[call.start : call.stop])


def count_heavy(flow: Flow, calls: Sequence[Call]) -> int:
    """Number of calls that contain a heavy operation."""
    return sum(_contains(flow, call, HEAVY) for call in calls)


def branch_name(flow: Flow, direct: Sequence[Call], kind: Kind) -> str | None:
    """Name of the module whose output is added: the one with the attention, else the last heavy or blurring one."""
    if kind == "msa":
        several = (call.module for names in (ATTENTION, PRODUCTS) for call in direct if _contains(flow, call, names))
        return next(several, None)
    heavy = (call.module for call in reversed(direct) if _contains(flow, call, HEAVY))
    blurring = (c.module for c in direct if any(o.blurs for o in flow.operations[c.start : c.stop]))
    return next(chain(heavy, blurring), None)


def tap_of(flow: Flow, residual: Residual, call: int) -> tuple[Tap, Node, bool]:
    """Where to hook the sum: at the block's output if it is that or holds it, else where it is read, or at the sum.

    Returns:
        the tap; the tensor found there, the sum itself or a view of it; whether it is the block's output.
    """
    block = flow.calls[call]
    later = flow.operations[residual.position + 1 : block.stop]
    last = not any(operation.name in HEAVY | ADDITIONS for operation in later)
    if last and block.module and block.writes and flow.shapes[block.writes[0]] == flow.shapes[residual.sum]:
        return Tap(block.module, "output", block.number), residual.sum, True
    for node in viewed(flow, residual.sum):
        reading = (Tap(call.module, "input", call.number) for call in flow.calls if call.reads[:1] == (node,))
        returning = (Tap(call.module, "output", call.number) for call in flow.calls if call.writes[:1] == (node,))
        if (tap := next(chain(reading, returning), None)) is not None:
            return tap, node, False
    output = block.writes[0] if block.module and block.writes else residual.sum
    joined = flow.operations[flow.maker[output]]
    if joined.name in JOINING and residual.sum in joined.reads:  # with channels or tokens that skip nothing
        return Tap(block.module, "output", block.number), output, True
    return function_tap(flow, residual.sum), residual.sum, False


def function_tap(flow: Flow, node: Node) -> Tap:
    """Where to hook a tensor that no module reads or returns first: at the function that makes it."""
    operation = flow.operations[flow.maker[node]]
    return Tap(operation.name, "function", operation.number)


def node_at(flow: Flow, tap: Tap) -> Node:
    """The tensor at a tap."""
    if tap.side == "function":
        return next(o.writes[0] for o in flow.operations if (o.name, o.number) == (tap.module, tap.call))
    call = next(call for call in flow.calls if (call.module, call.number) == (tap.module, tap.call))
    return (call.writes if tap.side == "output" else call.reads)[0]


def viewed(flow: Flow, node: Node) -> list[Node]:
    """A tensor, and the views that are made of it one after the other."""
    views = [node]
    for operation in flow.operations[flow.maker[node] + 1 :]:
        if operation.name in VIEWS and operation.reads == (views[-1],):
            views.append(operation.writes[0])
    return views

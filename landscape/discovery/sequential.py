"""Layers of networks without skips, such as VGG: one per convolution, linear layer and reducing pooling.

The norm, activation and dropout that follow a weight belong to its layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from landscape.discovery import graph, layer


@dataclass(frozen=True)
class Segment:
    """Consecutive operations that count as one layer."""

    kind: layer.Kind  # what it computes
    nodes: tuple[graph.Node, ...]  # its outputs, best first: after norm and activation, then earlier ones
    name: str  # of the module of its first operation
    leaves: tuple[layer.Tap, ...]  # its calls of modules without children, in order of execution
    linear: bool  # whether it acts on the last axis of its tensor


def segments(flow: graph.Flow, own: range) -> list[Segment]:
    """One segment per weight and reducing pooling of a network, in order of execution, without the final classifier.

    `own` are the positions of its operations: all, or those of one of several networks.
    """
    readers: dict[graph.Node, list[int]] = {}
    for i, operation in enumerate(flow.operations):
        for node in operation.reads:
            readers.setdefault(node, []).append(i)
    weights = [i for i in own if flow.operations[i].weight]
    found: list[Segment] = []
    for i in own:
        operation = flow.operations[i]
        classifies = i == weights[-1] and len(weights) > 1 if weights else False
        kind = None if classifies else _kind(flow, operation)
        if found and operation.blurs and is_whole_stream(flow, operation.writes[0], own.stop):
            kind = "smoothing"
        if kind is None:
            continue
        extent = _extent(flow, i, readers)
        nodes = tuple(flow.operations[j].writes[0] for j in reversed(extent))
        first = kind == "conv" and not found
        name = flow.calls[operation.call].module
        linear = operation.name == "linear"
        found.append(Segment("stem" if first else kind, nodes, name, _leaves(flow, extent), linear))
    return found


def _kind(flow: graph.Flow, operation: graph.Operation) -> layer.Kind | None:
    """The kind of layer that an operation makes; None for no layer."""
    before, after = flow.shapes[operation.reads[0]], flow.shapes[operation.writes[0]]
    if operation.name in graph.ATTENTION and len(after) > 2 and operation.name != "softmax":
        return "msa"
    if operation.weight:
        return "conv" if max(operation.weight[2:], default=1) > 1 else "mlp"
    pools = "pool" in operation.name or operation.name == "boolean_dispatch"
    if pools and len(after) == 4 and 1 < after[2] * after[3] < before[2] * before[3]:
        return "subsample"
    return None


def is_whole_stream(flow: graph.Flow, node: graph.Node, stop: int) -> bool:
    """Whether all later operations before position `stop` depend on this tensor and on none before it."""
    return all(min(operation.reads) >= node for operation in flow.operations[flow.maker[node] + 1 : stop])


def _extent(flow: graph.Flow, first: int, readers: dict[graph.Node, list[int]]) -> list[int]:
    """An operation and the shape-preserving ones that follow it alone: norm, activation, dropout."""
    found = [first]
    while True:
        (node, *_) = flow.operations[found[-1]].writes
        following = readers.get(node, [])
        if len(following) != 1:
            return found
        operation = flow.operations[following[0]]
        same_shape = operation.reads == (node,) and flow.shapes[operation.writes[0]] == flow.shapes[node]
        if not same_shape or operation.name in graph.HEAVY or operation.weight:
            return found
        found.append(following[0])


def _leaves(flow: graph.Flow, extent: Sequence[int]) -> tuple[layer.Tap, ...]:
    """Calls of the modules that perform some operations; () where a module performs one of them and others beside.

    Such a module may call dropout, which changes no values in evaluation and acts on whatever replaces the others.
    """
    parents = {call.parent for call in flow.calls} | {-1}
    operations = [flow.operations[i] for i in extent]
    calls = list(dict.fromkeys(o.call for o in operations if "dropout" not in o.name or o.call not in parents))
    if any(
        call < 0 or (call in parents and not set(range(flow.calls[call].start, flow.calls[call].stop)) <= set(extent))
        for call in calls
    ):
        return ()
    calls = [call for call in calls if not parents & {*calls} & {*flow.enclosing(flow.calls[call].parent)}]
    return tuple(layer.Tap(flow.calls[call].module, "output", flow.calls[call].number) for call in calls)

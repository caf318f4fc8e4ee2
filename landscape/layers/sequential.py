"""Networks without skips, such as VGG: a layer after every convolution, linear layer and reducing pooling.

What only shapes what a weight gives (norm, activation, dropout) belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from landscape.layers.graph import ATTENTION, Flow, Node, Operation
from landscape.layers.residual_blocks import HEAVY, Kind, Tap


@dataclass(frozen=True)
class Part:
    """A stretch of a network that counts as one layer.

    Args:
        kind: what it computes.
        nodes: where it ends, best first: behind norm and activation, and before where no module meets that.
        name: of the module that does the work.
        leaves: its calls of modules without children, in order of execution.
        last_axis: whether it works on the last axis of its tensor.
    """

    kind: Kind
    nodes: tuple[Node, ...]
    name: str
    leaves: tuple[Tap, ...]
    last_axis: bool


def parts(flow: Flow) -> list[Part]:
    """The layers of a network as its weights and poolings follow each other, without the classifier at the end."""
    readers: dict[Node, list[int]] = {}
    for i, operation in enumerate(flow.operations):
        for node in operation.reads:
            readers.setdefault(node, []).append(i)
    weights = [i for i, operation in enumerate(flow.operations) if operation.weight]
    found: list[Part] = []
    for i, operation in enumerate(flow.operations):
        classifies = i == weights[-1] and len(weights) > 1 if weights else False
        kind = None if classifies else _kind(flow, operation)
        if kind is None:
            continue
        stretch = _stretch(flow, i, readers)
        nodes = tuple(flow.operations[j].writes[0] for j in reversed(stretch))
        first = kind == "conv" and not found
        found.append(
            Part(
                "stem" if first else kind,
                nodes,
                _module(flow, operation),
                _leaves(flow, stretch),
                _is_linear(operation),
            )
        )
    return found


def _kind(flow: Flow, operation: Operation) -> Kind | None:
    """What an operation computes; None where it makes no layer."""
    before, after = flow.shapes[operation.reads[0]], flow.shapes[operation.writes[0]]
    if operation.name in ATTENTION and len(after) > 2 and operation.name != "softmax":
        return "msa"
    if operation.weight:
        return "conv" if max(operation.weight[2:], default=1) > 1 else "mlp"
    pools = "pool" in operation.name or operation.name == "boolean_dispatch"
    if pools and len(after) == 4 and 1 < after[2] * after[3] < before[2] * before[3]:
        return "subsample"
    return None


def _is_linear(operation: Operation) -> bool:
    return operation.name == "linear"


def _stretch(flow: Flow, first: int, readers: dict[Node, list[int]]) -> list[int]:
    """An operation and those after it that nothing but it feeds and that keep its shape: norm, activation, dropout."""
    found = [first]
    while True:
        (node, *_) = flow.operations[found[-1]].writes
        following = readers.get(node, [])
        if len(following) != 1:
            return found
        operation = flow.operations[following[0]]
        alike = operation.reads == (node,) and flow.shapes[operation.writes[0]] == flow.shapes[node]
        if not alike or operation.name in HEAVY or operation.weight:
            return found
        found.append(following[0])


def _module(flow: Flow, operation: Operation) -> str:
    return flow.calls[operation.call].module


def _leaves(flow: Flow, stretch: Sequence[int]) -> tuple[Tap, ...]:
    """The modules that hold the operations of a stretch; () where the model itself does one of them."""
    parents = {call.parent for call in flow.calls}
    calls = list(dict.fromkeys(flow.operations[i].call for i in stretch))
    if any(call < 0 or call in parents for call in calls):
        return ()
    return tuple(Tap(flow.calls[call].module, "output", flow.calls[call].number) for call in calls)

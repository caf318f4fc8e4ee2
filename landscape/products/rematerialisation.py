"""Passes over a recorded graph that save memory: merge equal operations, and compute cheap kept tensors again."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
LARGE = 128 * 2**20  # bytes of kept tensors from which on memory is saved; below, speed counts
SMALL = 1 / 16  # share of a tensor's bytes that may be kept instead of it, such as a factor per channel
DEEPEST = 3  # operations that lead from kept tensors to one that is computed again
MOST_WORK = 2  # arithmetic operations per tensor: every use computes it again, so that it is not held in between
_ALIASES = (_aten.alias.default, _aten.detach.default)
_VIEWS = (
    *_ALIASES, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
)  # fmt: skip
_ARITHMETIC = (
    _aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.mul.Tensor, _aten.mul.Scalar, _aten.neg.default,
    _aten.relu.default, _aten.threshold_backward.default, _aten.where.self, _aten.gt.Scalar, _aten.lt.Scalar,
    _aten.ge.Scalar, _aten.le.Scalar, _aten.sign.default, _aten.abs.default, _aten._to_copy.default,
    _aten.logical_not.default, _aten.logical_and.default,
)  # fmt: skip


def merge_equal(graph: fx.GraphModule) -> int:
    """Compute equal operations on equal arguments once; returns how many nodes disappeared.

    The two levels of differentiation record parts of the forward pass each on its own. Nothing that is written to in
    place or random is merged, and numbers do not change.
    """
    before = len(graph.graph.nodes)
    known: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or _written(node) or any(_written(a) for a in node.all_input_nodes):
            continue
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        key = (node.target, _frozen(node.args), _frozen(node.kwargs))
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.graph.erase_node(node)
        else:
            known[key] = node
    graph.graph.eliminate_dead_code()
    return before - len(graph.graph.nodes)


def recompute_cheap(graph: fx.Graph, dependent: set[fx.Node]) -> int:
    """Compute cheap tensors again where the `dependent` nodes use them, instead of keeping them; in place.

    Tensors that `dependent` nodes use and that are not among these are kept between products. One of them is computed
    again if views and arithmetic lead to it from others that are kept anyway, or from inputs: the largest first. The
    new nodes join `dependent`. Returns the bytes no longer kept. For graphs that keep at least `LARGE` bytes.
    """
    before = kept_bytes(graph, dependent)
    kept = kept_nodes(graph, dependent)
    for node in [n for n in kept if _is_view(n)]:
        _again(graph, node, dependent, [node])
    kept = kept_nodes(graph, dependent)
    for node in sorted(kept, key=_bytes, reverse=True):
        if _is_view(node):
            continue
        steps = _steps(node, set(kept) - {node}, _bytes(node) * SMALL, DEEPEST)
        uses = sum(user in dependent for user in node.users)
        if steps is not None and uses * sum(not _is_view(step) for step in steps) <= MOST_WORK:
            _again(graph, node, dependent, steps)
            kept = kept_nodes(graph, dependent)  # without it: nothing else may lean on it
    return before - kept_bytes(graph, dependent)


def kept_nodes(graph: fx.Graph, dependent: set[fx.Node]) -> list[fx.Node]:
    """What the dependent nodes use and do not compute."""
    used = [n for n in graph.nodes if n not in dependent and any(u in dependent and u.op != "output" for u in n.users)]
    return [n for n in used if n.op == "call_function"]


def kept_bytes(graph: fx.Graph, dependent: set[fx.Node]) -> int:
    """Bytes of the tensors that are kept, each memory once."""
    return sum(map(_bytes, {_base(n) for n in kept_nodes(graph, dependent)}))


def _again(graph: fx.Graph, node: fx.Node, dependent: set[fx.Node], steps: list[fx.Node]) -> None:
    """Copies of the steps, which end with the node, before every dependent user of the node."""
    for user in [u for u in node.users if u in dependent and u.op != "output"]:
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(user):
            for step in steps:
                arguments = {n: copies.get(n, n) for n in step.all_input_nodes}
                copies[step] = graph.node_copy(step, arguments.__getitem__)
        dependent.update(copies.values())
        user.replace_input_with(node, copies[node])


def _steps(node: fx.Node, kept: set[fx.Node], small: float, depth: int) -> list[fx.Node] | None:
    """The operations that lead to a node from kept ones, inputs and small ones, in order; None if there are not."""
    if depth == 0 or not (node.target in _ARITHMETIC or _is_view(node)):
        return None
    steps: list[fx.Node] = []
    for argument in node.all_input_nodes:
        if argument in steps or argument in kept or argument.op == "placeholder":
            continue
        if _bytes(argument) <= small and not _written(argument):
            continue
        further = _steps(argument, kept, small, depth - 1)
        if further is None:
            return None
        steps += [n for n in further if n not in steps]
    return [*steps, node]


def _is_view(node: fx.Node) -> bool:
    if node.target is _aten.reshape.default:
        value = _value(node.all_input_nodes[0])
        return value is not None and value.is_contiguous()
    return node.target in _VIEWS


def _base(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _value(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def _bytes(node: fx.Node) -> int:
    value = _value(node)
    return value.numel() * value.element_size() if value is not None and node.op != "placeholder" else 0


def _written(node: fx.Node) -> bool:
    """Whether a node writes in place, or something writes into its result."""
    return any(_mutates(n) for n in (node, *node.users))


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _frozen(value: Any) -> Any:
    """An argument as a key; numbers with their type, because 1 and 1.0 give different dtypes."""
    if isinstance(value, dict):
        return tuple((name, _frozen(value[name])) for name in sorted(value))
    if isinstance(value, Iterable) and not isinstance(value, fx.Node | str | torch.Size):
        return (type(value).__name__, *map(_frozen, value))
    return value if isinstance(value, fx.Node) else (type(value), str(value))

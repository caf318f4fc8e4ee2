"""Passes over a graph recorded by make_fx: split it by what depends on the vector, make it faster, and save memory.

A pass changes the graph alone. Its code, which takes as long to write as all passes together, is written by `split`.
Memory is saved by merging equal operations, and by computing cheap kept tensors again.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from landscape.products import matrix_products

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


def merge_equal(graph: fx.GraphModule) -> None:
    """Compute equal operations on equal arguments once.

    The two levels of differentiation record parts of the forward pass each on its own. Nothing that is written to in
    place or random is merged, and numbers do not change.
    """
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


def recompute_cheap(graph: fx.Graph, dependent: set[fx.Node]) -> None:
    """Compute cheap tensors again where the `dependent` nodes use them, instead of keeping them; in place.

    Tensors that `dependent` nodes use and that are not among these are kept between products. One of them is computed
    again if views and arithmetic lead to it from others that are kept anyway, or from inputs: the largest first. The
    new nodes join `dependent`. For graphs that keep at least `LARGE` bytes.
    """
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
    schemas = (getattr(n.target, "_schema", None) for n in (node, *node.users))
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _frozen(value: Any) -> Any:
    """An argument as a key; numbers with their type, because 1 and 1.0 give different dtypes."""
    if isinstance(value, dict):
        return tuple((name, _frozen(value[name])) for name in sorted(value))
    if isinstance(value, Iterable) and not isinstance(value, fx.Node | str | torch.Size):
        return (type(value).__name__, *map(_frozen, value))
    return value if isinstance(value, fx.Node) else (type(value), str(value))


def views_to_reshapes(graph: fx.GraphModule) -> None:
    """Replace views by reshapes: with an axis for mini-batches, or transposed products, a copy may be needed."""
    views = (_aten.view.default, _aten._unsafe_view.default)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in views:
            node.target = _aten.reshape.default


def plain_copies(graph: fx.GraphModule) -> None:
    """Replace copies into zeros, which forward mode makes for missing tangents, by what is copied."""
    for node in list(graph.graph.nodes):
        if node.target is _aten._new_zeros_with_same_feature_meta.default and not node.kwargs and len(node.args) == 2:
            node.target, node.args = _aten.zeros_like.default, (node.args[1],)
        if node.target is not _aten.copy.default or node.kwargs or len(node.args) != 2:
            continue
        into, source = (argument.meta.get("val") for argument in node.args)
        if into is not None and source is not None and (into.shape, into.dtype) == (source.shape, source.dtype):
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)


def lift_constants(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Make every tensor that a graph holds, such as a buffer of the model, an input before the others; return them.

    Values written to them later count then, and what is stored of the graph does not depend on them.
    """
    inputs = next(node for node in graph.graph.nodes if node.op == "placeholder")
    constants: dict[int, torch.Tensor] = {}
    lifted: dict[int, fx.Node] = {}
    for node in list(graph.graph.nodes):
        value = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in lifted:
            with graph.graph.inserting_before(inputs):
                lifted[id(value)] = graph.graph.placeholder(f"constant_{len(constants)}")
            lifted[id(value)].meta = {"val": node.meta.get("val", value)}
            constants[id(value)] = value
        node.replace_all_uses_with(lifted[id(value)])
        graph.graph.erase_node(node)
    return list(constants.values())


def split(whole: fx.GraphModule, *, vectors: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph whose last inputs are `vectors` tensors and whose first output does not depend on them.

    Returns:
        `once(inputs) -> [first output, *kept]` and `each(*kept, *vectors) -> other outputs`.
    """
    nodes = whole.graph.nodes
    whole.graph.eliminate_dead_code()
    inputs = [node for node in nodes if node.op == "placeholder"]
    use_onednn(whole.graph, dependent_on(whole.graph, inputs[-vectors:]))
    dependent = dependent_on(whole.graph, inputs[-vectors:])
    if kept_bytes(whole.graph, dependent) >= LARGE:
        recompute_cheap(whole.graph, dependent)
    (output,) = (node for node in nodes if node.op == "output")
    results = list(output.args[0])
    kept = [n for n in nodes if n not in dependent and any(user in dependent for user in n.users if user is not output)]
    kept += [r for r in results[1:] if isinstance(r, fx.Node) and r not in dependent and r not in kept]

    def part(given: list[fx.Node], copied: list[fx.Node], returned: list[fx.Node]) -> fx.Graph:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in given}
        for node in copied:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in returned])
        graph.eliminate_dead_code()
        return graph

    once = part([], [node for node in nodes if node not in dependent and node is not output], [results[0], *kept])
    given = [*kept, *inputs[-vectors:]]
    changing = [node for node in nodes if node in dependent and node not in given and node is not output]
    each = part(given, changing, results[1:])
    return fx.GraphModule(whole, once), fx.GraphModule(whole, each)


def dependent_on(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources and every node computed from them."""
    dependent = set(sources)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def use_onednn(graph: fx.Graph, changing: Collection[fx.Node]) -> None:
    """Replace matrix products by `matrix_products.matmul` where oneDNN is faster, in place.

    Matrices that are not among the `changing` nodes, computed more often than others, are laid out once for all.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_aten.mm.default, _aten.addmm.default):
            continue
        *bias, a, b = node.args
        if node.kwargs or not matrix_products.faster_by_onednn(a.meta["val"], b.meta["val"]):
            continue
        with graph.inserting_before(node):
            if a in changing and b not in changing and not a.meta["val"].is_contiguous():
                fixed, moving = (graph.call_function(_aten.t.default, (c,)) for c in (b, a))
                fixed.meta = {"val": b.meta["val"].t()}
                product = graph.call_function(_aten.t.default, (_matmul(graph, fixed, moving, copy=True),))
            else:
                product = _matmul(graph, a, b, copy=not a.meta["val"].is_contiguous())
            if bias:
                product.meta = dict(node.meta)
                product = graph.call_function(_aten.add.Tensor, (product, *bias))
        product.meta = node.meta
        node.replace_all_uses_with(product)
        graph.erase_node(node)


def _matmul(graph: fx.Graph, a: fx.Node, b: fx.Node, *, copy: bool) -> fx.Node:
    if copy:
        meta = dict(a.meta)
        a = graph.call_function(_aten.clone.default, (a,), {"memory_format": torch.contiguous_format})
        a.meta = meta
    return graph.call_function(matrix_products.operator(), (a, b))

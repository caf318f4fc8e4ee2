"""Passes over a graph recorded by make_fx: split it by what depends on the vector, and make its operations faster.

A pass changes the graph alone. Its code, which takes as long to write as all passes together, is written by `split`.
"""

from collections.abc import Collection, Iterable

import torch
from torch import fx

from landscape.products import matrix_products, rematerialisation

_aten = torch.ops.aten


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
    if rematerialisation.kept_bytes(whole.graph, dependent) >= rematerialisation.LARGE:
        rematerialisation.recompute_cheap(whole.graph, dependent)
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

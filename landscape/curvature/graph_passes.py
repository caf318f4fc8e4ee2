"""Passes over a graph recorded by make_fx: split it by what depends on the vector, and make its operations faster.

A pass changes the graph alone. Its code, which takes as long to write as all passes together, is written by `split`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from landscape.curvature import matrix_products, rematerialisation
from landscape.curvature.forward_statistics import use_forward_statistics

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
INPUT_ALONE = [True, False, False]  # outputs of a convolution's backward pass: gradients of its input, kernel, bias


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

    Values written to them later count then, and code compiled from the graph does not depend on them.
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
        use_forward_statistics(whole.graph)
        rematerialisation.merge_equal(whole)
        dependent = dependent_on(whole.graph, inputs[-vectors:])
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
    join_convolutions(each)
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


def join_convolutions(graph: fx.Graph) -> int:
    """Compute every sum of two convolutions of the same geometry, ungrouped and on a CPU, as one; in place.

    The derivative of a convolution along a vector is such a sum, of a changed map and a changed kernel, and so is that
    of its backward pass. conv(a, v) + conv(b, w) is the convolution of a and b concatenated as channels with v and w:
    one library call with a longer inner sum, and no second map to be written and added. On a CPU a Hessian product of
    a CIFAR ResNet takes 4 to 9 % less time at a batch of 16, the same at 128. Returns how many sums were joined.
    """
    joined = 0
    for node in list(graph.nodes):
        value = node.meta.get("val")
        on_cpu = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        if node.target is not _aten.add.Tensor or node.kwargs or not on_cpu:
            continue
        with graph.inserting_before(node):
            one = _joined_forward(graph, *node.args) or _joined_backward(graph, *node.args)
        if one is not None:
            node.replace_all_uses_with(one)
            one.meta = dict(node.meta)
            joined += 1
    graph.eliminate_dead_code()
    return joined


def _joined_forward(graph: fx.Graph, a: Any, b: Any) -> fx.Node | None:
    """conv(x, v) + conv(y, w) = conv([x, y], [v, w]), along the input channels."""
    if not (_calls(a, _FORWARD) and _calls(b, _FORWARD)):
        return None
    (x, v, bias, *geometry), (y, w, other_bias, *other) = a.args, b.args
    if bias is not None or other_bias is not None or geometry != other or not _ungrouped(*geometry):
        return None
    return graph.call_function(_FORWARD, (_cat(graph, x, y, 1), _cat(graph, v, w, 1), None, *geometry))


def _joined_backward(graph: fx.Graph, a: Any, b: Any) -> fx.Node | None:
    """The same for gradients by the input, which are convolutions of output gradients, along the output channels."""
    if not (_input_gradient(a) and _input_gradient(b)):
        return None
    (g, x, v, *geometry), (h, y, w, *other) = a.args[0].args, b.args[0].args
    if x is not y or geometry != other or not _ungrouped(*geometry[1:-1]):
        return None
    arguments = (_cat(graph, g, h, 1), x, _cat(graph, v, w, 0), *geometry)
    return graph.call_function(operator.getitem, (graph.call_function(_BACKWARD, arguments), 0))


def _ungrouped(stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int) -> bool:
    return not transposed and groups == 1


def _input_gradient(node: Any) -> bool:
    """Whether a node is the input gradient of a backward pass that computes nothing else."""
    if not (_calls(node, operator.getitem) and node.args[1] == 0 and _calls(node.args[0], _BACKWARD)):
        return False
    return list(node.args[0].args[-1]) == INPUT_ALONE


def _calls(node: Any, function: object) -> bool:
    """Whether a node calls a function and its result has one user."""
    return isinstance(node, fx.Node) and node.target is function and len(node.users) == 1


def _cat(graph: fx.Graph, a: fx.Node, b: fx.Node, axis: int) -> fx.Node:
    return graph.call_function(_aten.cat.default, ([a, b], axis))

"""Replace what the derivatives of softmax and layer norm compute a second time by what the forward pass has.

PyTorch's formula for the derivative of softmax along a vector computes the exponentials anew, and those of layer norm
the means and deviations. A traced graph then keeps the exponentials beside the softmax, and every centred map once per
formula. The results that replace them are equal but for rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_SOFTMAX = (_aten._softmax.default, _aten._safe_softmax.default)
_MEAN, _INVERSE_DEVIATION = 1, 2  # results of a layer norm


def use_forward_statistics(graph: fx.Graph) -> int:
    """Apply the replacements in place; returns how many were made. Nodes that nothing uses any more stay."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    made = 0
    for node in list(order):
        statistic = _mean(node) or _inverse_deviation(node)
        softmax = _softmax_of_sum(node)
        with graph.inserting_before(node):
            if statistic is not None and order[statistic] < order[node]:
                new = _call(graph, _aten.reshape.default, (statistic, list(node.meta["val"].shape)), like=node)
            elif softmax is not None and order[softmax] < order[node]:
                new = _weighted_sum(graph, node, softmax)
            else:
                continue
        node.replace_all_uses_with(new)
        made += 1
    return made


def _softmax_of_sum(node: Any) -> fx.Node | None:
    """Of a node sum(exp(x - max x) t) / sum(exp(x - max x)): softmax(x), which the sum over t can be taken with."""
    if not (_calls(node, _aten.div.Tensor) and all(_calls(n, _aten.sum.dim_IntList) for n in node.args)):
        return None
    (weighted, *over), (exponential, *summed) = node.args[0].args, node.args[1].args
    if over != summed or len(summed) != 2 or len(summed[0]) != 1 or summed[1] is not True:
        return None
    if not (_calls(weighted, _aten.mul.Tensor) and weighted.args.count(exponential) == 1):
        return None
    shifted: Any = exponential.args[0] if _calls(exponential, _aten.exp.default) else None
    if not (_calls(shifted, _aten.sub.Tensor) and not shifted.kwargs and _calls(shifted.args[1], _aten.amax.default)):
        return None
    x = shifted.args[0]
    if list(shifted.args[1].args) != [x, *summed]:
        return None
    found = (n for n in x.users if n.target in _SOFTMAX and _axes(x, n.args[1:2]) == _axes(x, summed[0]))
    return next((n for n in found if _of_one_kind(n, exponential)), None)


def _weighted_sum(graph: fx.Graph, node: Any, softmax: fx.Node) -> fx.Node:
    """sum(softmax(x) t) for a node that `_softmax_of_sum` accepts."""
    weighted, *over = node.args[0].args
    exponential = node.args[1].args[0]
    arguments = tuple(softmax if a is exponential else a for a in weighted.args)
    product = _call(graph, _aten.mul.Tensor, arguments, like=weighted)
    return _call(graph, _aten.sum.dim_IntList, (product, *over), like=node)


def _mean(node: Any) -> fx.Node | None:
    """Of a node that is the mean of a map over the axes of its layer norm: the mean that the layer norm returns."""
    if _calls(node, _aten.mean.dim) and not node.kwargs:
        x, axes, *keep = node.args
    elif _calls(node, operator.getitem) and node.args[1] == 1 and _calls(node.args[0], _aten.var_mean.correction):
        (x, *over), options = node.args[0].args, node.args[0].kwargs
        axes, keep = (over[0] if over else options.get("dim")), [options.get("keepdim", False)]
    else:
        return None
    if keep != [True] or axes is None:
        return None
    first = x.meta["val"].dim() - len(axes)
    for norm in x.users:
        if _calls(norm, _aten.native_layer_norm.default) and norm.args[0] is x and len(norm.args[1]) == len(axes):
            return _result(norm, _MEAN, node) if _axes(x, axes) == list(range(first, first + len(axes))) else None
    return None


def _inverse_deviation(node: Any) -> fx.Node | None:
    """Of a node 1 / sqrt(v + (1 / r^2 - v)), where r is the inverse deviation that a layer norm returns: r."""
    if not (_calls(node, _aten.rsqrt.default) and _calls(node.args[0], _aten.add.Tensor) and not node.args[0].kwargs):
        return None
    v, rest = node.args[0].args
    if not (_calls(rest, _aten.sub.Tensor) and not rest.kwargs and rest.args[1] is v):
        return None
    if not (_calls(rest.args[0], _aten.pow.Tensor_Scalar) and rest.args[0].args[1] == 2):
        return None
    inverse = rest.args[0].args[0]
    r: Any = inverse.args[0] if _calls(inverse, _aten.reciprocal.default) else None
    if not (_calls(r, operator.getitem) and _calls(r.args[0], _aten.native_layer_norm.default)):
        return None
    return _result(r.args[0], _INVERSE_DEVIATION, node) if r.args[1] == _INVERSE_DEVIATION else None


def _result(norm: fx.Node, which: int, node: fx.Node) -> fx.Node | None:
    """A result of a layer norm, if it is used and can take the node's place."""
    found = (n for n in norm.users if _calls(n, operator.getitem) and n.args[1] == which)
    return next((n for n in found if _of_one_kind(n, node)), None)


def _axes(x: fx.Node, axes: Sequence[Any]) -> list[int]:
    return sorted(axis % x.meta["val"].dim() for axis in axes)


def _of_one_kind(a: fx.Node, b: fx.Node) -> bool:
    """Whether two results have the same dtype and number of entries."""
    first, second = a.meta["val"], b.meta["val"]
    return bool(first.dtype == second.dtype and first.numel() == second.numel())


def _calls(node: Any, function: object) -> bool:
    return isinstance(node, fx.Node) and node.target is function


def _call(graph: fx.Graph, function: Any, arguments: tuple[Any, ...], *, like: fx.Node) -> fx.Node:
    made = graph.call_function(function, arguments)
    made.meta = dict(like.meta)
    return made

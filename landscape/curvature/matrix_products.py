"""Products of matrices in single precision on a CPU, by the library that uses the whole width of its registers.

torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors that are not Intel's, at half the
speed. oneDNN, which comes with torch and makes its convolutions, uses it on all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

ENOUGH = 4_000_000  # operations: below that oneDNN's start, about 10 us a product, costs more than it saves
_aten = torch.ops.aten
_untyped: Any = torch


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product (m, k) @ (k, n), by oneDNN where that is faster; rounding differs with the library.

    Args:
        a: (m, k); of a transposed one oneDNN makes a copy first.
        b: (k, n), in either order.
    """
    if not suits(a, b):
        return a @ b
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return product


def suits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is to multiply these: large enough, in single precision, on a CPU with AVX-512."""
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != torch.float32:
        return False
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] >= ENOUGH and _wide()


@functools.cache
def _wide() -> bool:
    has: bool = _untyped.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has and torch.backends.cpu.get_cpu_capability() == "AVX512"


# As an operator of torch, so that a compiled graph calls it as it is, with transposed matrices uncopied.
_library = _untyped.library.Library("landscape", "DEF")
_library.define("matmul(Tensor a, Tensor b) -> Tensor")
_library.impl("matmul", matmul, "CPU")
_library.impl("matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")


def widen(graph: fx.Graph, changing: Collection[fx.Node]) -> None:
    """Replace the matrix products of a recorded graph by `matmul` where it suits them.

    Args:
        graph: as recorded by make_fx; changed in place.
        changing: nodes that are computed more often than the others, whose matrices are laid out once for all.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (_aten.mm.default, _aten.addmm.default):
            continue
        *bias, a, b = node.args
        if node.kwargs or not suits(a.meta["val"], b.meta["val"]):
            continue
        with graph.inserting_before(node):
            if a in changing and b not in changing and not a.meta["val"].is_contiguous():
                fixed, moving = (graph.call_function(_aten.t.default, (c,)) for c in (b, a))
                found = graph.call_function(_aten.t.default, (_multiplied(graph, fixed, moving, copy=True),))
            else:
                found = _multiplied(graph, a, b, copy=not a.meta["val"].is_contiguous())
            if bias:
                found = graph.call_function(_aten.add.Tensor, (found, *bias))
        found.meta = node.meta
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _multiplied(graph: fx.Graph, a: fx.Node, b: fx.Node, *, copy: bool) -> fx.Node:
    if copy:
        a = graph.call_function(_aten.clone.default, (a,), {"memory_format": torch.contiguous_format})
    return graph.call_function(torch.ops.landscape.matmul.default, (a, b))

"""Single-precision matrix products on a CPU by oneDNN where it is faster than torch's default, MKL.

MKL leaves AVX-512 unused on processors that are not Intel's, at half the speed. oneDNN, which comes with torch and
computes its convolutions, uses it on all of them.
"""

import functools
from typing import Any

import torch
from torch import Tensor

LARGE = 4_000_000  # operations: below that oneDNN's start, about 10 us a product, costs more than it saves
_untyped: Any = torch


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product (m, k) @ (k, n), by oneDNN where that is faster; rounding differs with the library.

    oneDNN copies a transposed `a` first, and takes `b` in either memory order; of a `b` with gaps in memory it is
    hundreds of times slower.
    """
    if not faster_by_onednn(a, b):
        return a @ b
    weight = b.t() if b.is_contiguous() else b.t().contiguous()  # a copy only where there are gaps
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
    return product


def faster_by_onednn(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices are large enough, in single precision, and on a CPU with AVX-512."""
    if a.device.type != "cpu" or a.dtype != torch.float32 or b.dtype != torch.float32:
        return False
    return 2 * a.shape[0] * a.shape[1] * b.shape[1] >= LARGE and _has_avx512()


@functools.cache
def _has_avx512() -> bool:
    has: bool = _untyped.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has and torch.backends.cpu.get_cpu_capability() == "AVX512"


def operator() -> Any:
    """`matmul` as an operator of torch: a recorded graph calls it as it is."""
    _library()
    return torch.ops.landscape.matmul.default


@functools.cache
def _library() -> Any:
    """Registered at first use, once per process; cached, because torch removes the operators of a freed library."""
    library = _untyped.library.Library("landscape", "DEF")
    library.define("matmul(Tensor a, Tensor b) -> Tensor")
    library.impl("matmul", matmul, "CPU")
    library.impl("matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), "Meta")
    return library

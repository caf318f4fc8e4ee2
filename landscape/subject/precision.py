"""Exact arithmetic: a measurement computes float32 products in float32, whatever the caller's settings allow.

Several settings of the process let PyTorch compute products of float32 tensors with fewer digits: TF32 keeps 10 bits of
the mantissa instead of 23 (on CUDA it is switched on for convolutions unless one switches it off), bf16 keeps 7
(`torch.set_float32_matmul_precision("medium")`, on CPUs too), autocast rounds inputs and weights, and sums of products
of half-precision tensors may be rounded. The relative error is 1e-3 or more: no residual of an eigenvalue and no
curvature would mean anything. `exact_arithmetic` switches all of this off for the duration of a measurement and then
restores what it found, also after an error. It also lets cuDNN neither choose its algorithms by a benchmark nor take
one that adds in a random order, so that the same unit gives the same numbers again, and takes the one path of
transformer and recurrent layers that has gradients. Some functions of PyTorch itself add in any order on a GPU, such as
the derivative of bilinear interpolation: networks with those are reproducible to rounding, which is noted.

A loss of logits is computed in double precision (`exact`). The one place that asks for less is an execution mode of
surfaces, bf16 or TF32 (`weight_space.forward_mode`), whose deviation is measured at control points. Training has its
own precision, that of the recipe.
"""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

EXACT = 2**26  # logits up to which a loss is computed in double precision
_backends: Any = torch.backends
REDUCED = (
    "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
)  # fmt: skip


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Full float32 products, no autocast and deterministic cuDNN meanwhile; the caller's settings afterwards."""
    with contextlib.ExitStack() as of_thread:
        for kind in _device_types():
            of_thread.enter_context(torch.autocast(kind, enabled=False))
        of_thread.enter_context(_exact_process())
        yield


class _Block:
    """A block that runs with exact settings of the process, and what restores those from before it."""

    def __init__(self, found: contextlib.ExitStack) -> None:
        self.found = found


_blocks: list[_Block] = []  # in the order in which they were entered, by any thread
_changing = threading.Lock()


@contextlib.contextmanager
def _exact_process() -> Iterator[None]:
    """The settings of the process; where blocks of several threads overlap, the last one to end restores them."""
    with _changing, contextlib.ExitStack() as found:
        _switch(found, _backends.cudnn, "benchmark", False)
        _switch(found, _backends.cudnn, "deterministic", True)
        for name in REDUCED:
            _forbid_reduction(found, name)
        _one_attention(found)
        for owner in (torch, sys.modules["torch.nn.utils.weight_norm"]):
            _switch(found, owner, "_weight_norm", composed_weight_norm)
        for name, function in DENSE.items():
            _switch(found, torch, name, function)
        for name, function in RECURRENT.items():
            for owner in (torch, torch._VF):
                _switch(found, owner, name, function)
        _set_tf32(found, allowed=False)
        _blocks.append(block := _Block(found.pop_all()))
    try:
        yield
    finally:
        with _changing:
            position = _blocks.index(block)
            if block is _blocks[-1]:
                block.found.close()
            else:  # the block entered next found exact settings, and restores those from before this one instead
                _blocks[position + 1].found = block.found
            del _blocks[position]


@contextlib.contextmanager
def gpu_products(*, tf32: bool) -> Iterator[None]:
    """Launch products on a GPU with TF32 or without, whichever other threads launch with: theirs wait meanwhile."""
    with _launching, contextlib.ExitStack() as found:
        if tf32:
            _set_tf32(found, allowed=True)
        yield


def _set_tf32(found: contextlib.ExitStack, *, allowed: bool) -> None:
    """No bf16 within float32 products, and no TF32 unless it is allowed on GPUs.

    PyTorch has two interfaces for it, an old one (all versions) and from 2.9 on `fp32_precision`. Reading the old one
    raises an error where the caller used the new one, so that only the new one is restored then. Some versions warn
    once that the old one will go.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(TF32|fp32_precision)")
        _set_tf32_by_both(found, allowed)


def _set_tf32_by_both(found: contextlib.ExitStack, allowed: bool) -> None:
    if hasattr(_backends.cuda.matmul, "fp32_precision"):
        for backend, operation in (
            ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"),
            ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
        ):  # fmt: skip
            if (product := getattr(getattr(_backends, backend), operation, None)) is not None:
                found.callback(_restore_precision, product, product.fp32_precision)
    with contextlib.suppress(RuntimeError):  # the caller used the new interface
        found.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    with contextlib.suppress(RuntimeError):
        found.callback(setattr, _backends.cudnn, "allow_tf32", _backends.cudnn.allow_tf32)
    _backends.cudnn.allow_tf32 = allowed
    if hasattr(_backends.cuda.matmul, "fp32_precision"):
        for backend, operation in (("cudnn", "conv"), ("cudnn", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn")):
            if (product := getattr(getattr(_backends, backend), operation, None)) is not None:
                product.fp32_precision = "tf32" if allowed and backend == "cudnn" else "ieee"


def _restore_precision(product: Any, before: str) -> None:
    """Restore the precision of a kind of product; one that follows the setting for all products follows it again."""
    product.fp32_precision = "none"
    if product.fp32_precision != before:
        product.fp32_precision = before


def _one_attention(found: contextlib.ExitStack) -> None:
    """Run transformer layers by one path: the fast one, of passes without gradients alone, computes another function.

    It zeroes padded positions, so that losses without gradients would differ from those that curvature belongs to.
    """
    if (mha := getattr(_backends, "mha", None)) is not None:
        found.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)


def composed_weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The weight v g / |v|, the norm over all dimensions but one, from operations with right second derivatives.

    PyTorch's fused kernel, which weight normalisation takes for the first and the last dimension, has wrong ones.
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _dense(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The function without its argument `sparse`, at that position: sparse gradients have no derivative."""

    @wraps(function)
    def dense(*args: Any, **options: Any) -> Any:
        return function(*(False if i == position else value for i, value in enumerate(args)),
                        **{name: name != "sparse" and value for name, value in options.items()})  # fmt: skip

    return dense


def _composed_recurrence(function: Callable[..., Any]) -> Callable[..., Any]:
    """The recurrent layer without cuDNN where gradients are recorded: cuDNN has none in evaluation mode, nor second."""

    @wraps(function)
    def composed(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled() or not _backends.cudnn.enabled:
            return function(*args, **options)
        with _without_cudnn:  # the setting is the process's: another thread would restore what this one has set
            _backends.cudnn.enabled = False
            try:
                return function(*args, **options)
            finally:
                _backends.cudnn.enabled = True

    return composed


_without_cudnn, _launching = threading.RLock(), threading.RLock()
DENSE = {"embedding": _dense(torch.embedding, 4), "embedding_bag": _dense(torch.embedding_bag, 5)}
RECURRENT = {name: _composed_recurrence(getattr(torch, name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


def _switch(found: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set a setting, if this version of PyTorch has it, and restore it later."""
    with contextlib.suppress(AttributeError):
        found.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _forbid_reduction(found: contextlib.ExitStack, name: str) -> None:
    """Forbid rounded sums of half-precision products; whether sums may be split, a part of it later, stays as it is."""
    split = getattr(_backends.cuda.matmul, f"{name}_split_k", None)
    if split is not None:
        found.callback(setattr, _backends.cuda.matmul, name, (getattr(_backends.cuda.matmul, name), split))
        setattr(_backends.cuda.matmul, name, (False, split))
    else:
        _switch(found, _backends.cuda.matmul, name, False)


def _device_types() -> list[str]:
    """Types of the devices of this machine: autocast warns about others."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def exact(logits: Tensor) -> Tensor:
    """Logits in double precision, unless they are so many that they would fill the memory.

    A fitted sample has a gradient p - 1 by its logit that single precision rounds away: at a loss of 1e-9 the largest
    eigenvalues of a small network were 22 to 930 % wrong, at 8e-4 by up to 4e-5.
    """
    return logits.double() if logits.numel() <= EXACT else logits


def at_least_single(outputs: Tensor) -> torch.dtype:
    """The precision of losses of outputs: their own, and at least single."""
    return torch.promote_types(outputs.dtype, torch.float32)

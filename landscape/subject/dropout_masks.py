"""Frozen dropout masks: dropout in evaluation mode, as a function of the sample and of nothing else that may vary.

A mask is a hash of (seed, number of the dropout call within the forward pass, position of the sample in the data,
position of the element within the sample), computed by integer arithmetic where it is needed. It is thus the same for
every batch size, pass and device, and takes no memory between passes.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.models.blocks import stochastic_depth
from landscape.probe import derived_seed

ELEMENTS = {F.dropout, torch.dropout, torch.dropout_}
CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_}
ALPHA = {F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_}
ALPHA_CHANNELS = {F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_}
DROPOUTS = ELEMENTS | CHANNELS | ALPHA | ALPHA_CHANNELS
ATTENTIONS = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
SATURATED = -1.7580993408473766  # what alpha dropout sets an element to: the limit of SELU
ATTENTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_active: ContextVar[FrozenMasks | None] = ContextVar("masks", default=None)


class FrozenMasks(TorchFunctionMode):
    """The masks of one forward pass: every dropout that it calls is on, with its mask; a context manager.

    Covers the functions and modules of `torch.nn` on tensors, dropout inside attention, and stochastic depth of the
    bundled networks, timm, torchvision and transformers, of which every sample has its own.

    Args:
        seed: of the masks.
        positions: position in the data of every sample of the mini-batch, (N,) int64.
        hidden: rates of dropout calls, by their number, that are told a rate in training mode only (`dropout_rates`).
    """

    def __init__(self, seed: int, positions: Tensor, hidden: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self._seed, self._positions, self._hidden = seed, positions, hidden or {}
        self.calls: list[float] = []  # rate of every call of the pass so far

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function in DROPOUTS:
            return self._dropout(function, *args, **options)
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **options)
        if function is F.multi_head_attention_forward:
            return self._multi_head_attention(*args, **options)
        return function(*args, **options)

    def stochastic_depth(self, branch: Tensor, rate: float) -> Tensor:
        """The branch without some of the samples, the others divided by 1 - rate."""
        rate, number = self._next(rate)
        with torch._C.DisableTorchFunction():
            return self._dropped(branch, rate, number, dims=0) if rate else branch

    def _dropout(
        self, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any
    ) -> Tensor:
        rate, number = self._next(p)
        if not rate:
            return input
        in_place = inplace or function.__name__.endswith("_")
        dims = 2 if function in CHANNELS | ALPHA_CHANNELS else None
        with torch._C.DisableTorchFunction():
            alpha = function in ALPHA | ALPHA_CHANNELS
            after = (_alpha if alpha else _scaled)(input, self._kept(input, rate, number, dims), rate)
            return input.copy_(after) if in_place else after

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        rate, number = self._next(dropout_p)
        shown: dict[str, Any] = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if not rate or _others_listen():  # which read the attention maps from the call
            plain = F.scaled_dot_product_attention(query, key, value, **shown)
            if not rate:
                return plain
        with torch._C.DisableTorchFunction():
            if enable_gqa:
                key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
            logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
            if is_causal:
                attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).tril()
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                logits = logits.masked_fill(~attn_mask, -math.inf)
            elif attn_mask is not None:
                logits = logits + attn_mask
            return self._dropped(logits.softmax(dim=-1), rate, number) @ value

    def _multi_head_attention(self, *args: Any, **options: Any) -> Any:
        """The function of `nn.MultiheadAttention` with this dropout in place of its own."""
        if _others_listen():
            F.multi_head_attention_forward(*args, **options)

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool) -> Tensor:
            return self._attention(q, k, v, mask, p, is_causal)

        def dropout(weights: Tensor, p: float) -> Tensor:
            return self._dropout(F.dropout, weights, p)

        bound = ATTENTION_SIGNATURE.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        with torch._C.DisableTorchFunction():
            if not given["dropout_p"]:
                self._next(0.0)
                return F.multi_head_attention_forward(**given)
            own = {**vars(F), "dropout": dropout, "scaled_dot_product_attention": attention}
            return FunctionType(F.multi_head_attention_forward.__code__, own)(**given | {"training": True})

    def _next(self, rate: float) -> tuple[float, int]:
        """Rate and number of the next call."""
        number = len(self.calls)
        self.calls.append(self._hidden.get(number, float(rate)))
        return self.calls[-1], number

    def _dropped(self, x: Tensor, rate: float, number: int, dims: int | None = None) -> Tensor:
        return _scaled(x, self._kept(x, rate, number, dims), rate)

    def _kept(self, x: Tensor, rate: float, number: int, dims: int | None) -> Tensor:
        """Mask of what remains of a tensor, shaped so that it broadcasts to it: of its first `dims` dimensions.

        The samples lie along the first dimension, each in one row or in several that follow each other (windows,
        heads), or along the second.

        Raises:
            ValueError: there is no such dimension.
        """
        samples = len(self._positions)
        shape = tuple(x.shape[:1] if dims == 0 else x.shape if dims is None else x.shape[:dims])
        second = x.ndim > 1 and x.shape[0] != samples == x.shape[1]
        if not second and (not x.ndim or not samples or x.shape[0] % samples):
            raise ValueError(
                f"dropout acts on {tuple(x.shape)}, expected rows for the {samples} samples of the mini-batch: its "
                "masks cannot be frozen per sample; drop --mc-dropout"
            )
        if second:
            shape = (samples, *((x.shape[0],) if dims != 0 else ()), *shape[2:])
        elements = math.prod(shape) // samples
        mask = kept(derived_seed(self._seed, number), self._positions, elements, rate).view(shape)
        if second:
            mask = mask.view(1, samples) if dims == 0 else mask.transpose(0, 1)
        return mask.view(*mask.shape, *(1,) * (x.ndim - mask.ndim)) if mask.ndim < x.ndim else mask


def kept(seed: int, positions: Tensor, elements: int, rate: float) -> Tensor:
    """Which elements of every sample remain, (N, elements) bool, each with probability 1 - rate."""
    first, second = _keys(seed, positions)
    counter = torch.arange(elements, dtype=torch.int32, device=positions.device)
    mixed = _mixed(counter.mul(-1640531527), 16, 0x7FEB352D)[None] ^ first[:, None]
    mixed = _mixed(mixed, 15, -2073254261).add_(second[:, None])
    mixed = _mixed(mixed, 16, 0x7FEB352D)
    return mixed >= min(round(rate * 2**32) - 2**31, 2**31 - 1)


def _keys(seed: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two words per sample, (N,) int32 each, by the 64-bit finaliser of SplitMix64 (Steele et al. 2014)."""
    z = positions * -7046029254386353131 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
    z = z ^ ((z >> 31) & (2**33 - 1))
    return z.to(torch.int32), (z >> 32).to(torch.int32)


def _mixed(words: Tensor, shift: int, factor: int) -> Tensor:
    """A round of a 32-bit hash: (x ^ (x >>> shift)) * factor modulo 2^32."""
    return words.bitwise_right_shift(shift).bitwise_and_(2 ** (32 - shift) - 1).bitwise_xor_(words).mul_(factor)


def _scaled(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    return (
        torch.where(mask, x * (1 / (1 - rate)), torch.zeros((), dtype=x.dtype, device=x.device)) if rate < 1 else x * 0
    )


def _alpha(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Alpha dropout keeps mean and variance of SELU's outputs (Klambauer et al. 2017)."""
    scale = ((1 - rate) * (1 + rate * SATURATED**2)) ** -0.5
    low = torch.full((), SATURATED, dtype=x.dtype, device=x.device)
    moved: Tensor = torch.where(mask, x, low) * scale - scale * rate * SATURATED
    return moved


def _others_listen() -> bool:
    """Whether other modes see the calls of this one."""
    return bool(torch._C._len_torch_function_stack())


@contextlib.contextmanager
def frozen_masks(model: Callable[..., Any], masks: FrozenMasks) -> Iterator[None]:
    """Run the block, one forward pass of a model, with the masks; the model is as before afterwards."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        own = _active.get() is masks  # another thread may have hooks on the same model
        return masks.stochastic_depth(output, depth_rate(module)) if own else None

    modules = model.modules() if isinstance(model, nn.Module) else ()
    handles = [module.register_forward_hook(hook) for module in modules if depth_rate(module)]
    mask_token, depth_token = _active.set(masks), stochastic_depth.set(masks.stochastic_depth)
    try:
        with masks:
            yield
    finally:
        _active.reset(mask_token)
        stochastic_depth.reset(depth_token)
        for handle in handles:
            handle.remove()


class _Rates(FrozenMasks):
    """Lists the rates of all dropout calls and the modules that make them; drops nothing."""

    def __init__(self) -> None:
        super().__init__(0, torch.zeros(0, dtype=torch.int64))
        self.running: list[nn.Module] = []
        self.callers: dict[nn.Module, None] = {}

    def _next(self, rate: float) -> tuple[float, int]:
        super()._next(rate)
        if self.running:
            self.callers[self.running[-1]] = None
        return 0.0, len(self.calls) - 1

    def leave(self) -> None:
        self.running.pop()


def dropout_rates(model: nn.Module, run: Callable[[], object]) -> tuple[list[float], dict[int, float]]:
    """Rates of the dropout calls of `run`, a forward pass, and of those that are told 0 in evaluation mode.

    Attention is told the rate by its module, 0 in evaluation; what it would be told in training is found by a second
    pass in which the modules that call dropout themselves, and only these, are in training mode.

    Returns:
        the rate of every call, 0 for none, and the hidden ones among them by number.
    """
    first, second = _Rates(), _Rates()
    handles = [module.register_forward_pre_hook(lambda m, _: first.running.append(m)) for module in model.modules()]
    handles += [module.register_forward_hook(lambda *_: first.leave()) for module in model.modules()]
    try:
        with frozen_masks(model, first):
            run()
    finally:
        for handle in handles:
            handle.remove()
    modes = {module: module.training for module in first.callers}
    try:
        for module in modes:
            module.training = True
        with frozen_masks(model, second), contextlib.suppress(Exception):  # of another path through a user's model
            run()
    finally:
        for module, training in modes.items():
            module.training = training
    if len(first.calls) != len(second.calls):
        return first.calls, {}
    pairs = enumerate(zip(first.calls, second.calls, strict=True))
    hidden = {number: there for number, (here, there) in pairs if there > 0 and not here}
    return [hidden.get(number, rate) for number, rate in enumerate(first.calls)], hidden


def depth_rate(module: nn.Module) -> float:
    """The rate of a module for stochastic depth; 0 for other modules."""
    name = type(module).__name__
    if not name.endswith("DropPath") and name != "StochasticDepth":
        return 0.0
    return float(getattr(module, "drop_prob", getattr(module, "p", 0.0)) or 0.0)

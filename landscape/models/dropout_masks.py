"""Frozen dropout masks: dropout in evaluation mode, as a function of the sample and of nothing else that may vary.

A mask is a hash (`random_vectors.words`) of seed, number of the dropout call within the forward pass, position of the
sample in the data and position of the element within the sample. It is thus the same for every batch size, pass and
device, and takes no memory between passes.
"""

import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.models.blocks import stochastic_depth
from landscape.models.recurrent_layers import RECURRENT, RecurrentCall, order_of, rows_of_packed
from landscape.probe import derived_seed
from landscape.random_vectors import hashed_columns, words

ELEMENTS = {F.dropout, torch.dropout, torch.dropout_}
CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout, torch.feature_dropout_}
ALPHA = {F.alpha_dropout, torch.alpha_dropout, torch.alpha_dropout_}
ALPHA_CHANNELS = {F.feature_alpha_dropout, torch.feature_alpha_dropout, torch.feature_alpha_dropout_}
DROPOUTS = ELEMENTS | CHANNELS | ALPHA | ALPHA_CHANNELS
SATURATED = -1.7580993408473766  # what alpha dropout sets an element to: the limit of SELU
ATTENTION_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_hooking = threading.Lock()  # torch counts hooks without one, and two with one number would replace each other
_active: "ContextVar[FrozenMasks | None]" = ContextVar("masks", default=None)


class DropoutCall(NamedTuple):
    """One call of a dropout function, as `dropout_calls` has seen it."""

    told: float  # the rate that it is given in evaluation mode, which may be 0
    rate: float  # the rate in training mode
    samples_second: bool  # whether the samples lie along the second dimension, else along the first
    module: str = ""  # that makes it, "" for the model itself


class FrozenMasks(TorchFunctionMode):
    """The masks of one forward pass: every dropout that it calls is on, with its mask; a context manager.

    Covers the functions and modules of `torch.nn` on tensors, dropout inside attention and between recurrent layers,
    and stochastic depth of the bundled networks, timm, torchvision and transformers, of which every sample has its own.

    Args:
        seed: of the masks.
        positions: position in the data of every sample of the mini-batch, (N,) int64.
        known: what is known of the calls of a pass, in order (`dropout_calls`); without it their rates are as told.
    """

    def __init__(self, seed: int, positions: Tensor, known: Sequence[DropoutCall] = ()) -> None:
        super().__init__()
        self._seed, self._positions, self._known = seed, positions, known
        self.calls: list[float] = []  # rate of every call of the pass so far
        self.order: Tensor | None = torch.zeros(0)  # `order_of` the inputs of the recurrent module that runs

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
        if function in RECURRENT:
            call = RecurrentCall.of(function, *args)
            return self._recurrent(call) if call.rate and call.layers > 1 else function(*args)
        return function(*args, **options)

    def stochastic_depth(self, branch: Tensor, rate: float) -> Tensor:
        """The branch without some of the samples, the others divided by 1 - rate."""
        rate, number = self._next(rate, branch)
        with torch._C.DisableTorchFunction():
            return self._dropped(branch, rate, number, dims=0) if rate else branch

    def _dropout(
        self, function: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any
    ) -> Tensor:
        rate, number = self._next(p, input)
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
        rate, number = self._next(dropout_p, query)
        shown: dict[str, Any] = {
            "attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
        }  # fmt: skip
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
                self._next(0.0, given["query"])
                return F.multi_head_attention_forward(**given)
            own = {**vars(F), "dropout": dropout, "scaled_dot_product_attention": attention}
            return FunctionType(F.multi_head_attention_forward.__code__, own)(**given | {"training": True})

    def _recurrent(self, call: RecurrentCall) -> tuple[Tensor, ...]:
        """Stacked recurrent layers with dropout between them, of the same masks for padded and packed sequences."""

        def between(x: Tensor) -> Tensor:
            rate, number = self._next(call.rate, x)
            if not rate:
                return x
            with torch._C.DisableTorchFunction():
                if not call.sizes:
                    return self._dropped(x, rate, number)
                sequences, steps = int(call.sizes[0][0]), len(call.sizes[0])
                mask = self._kept(x.new_empty(()).expand(sequences, steps, x.shape[1]), rate, number, None)
                return _scaled(x, rows_of_packed(mask, call.sizes[0], self.order, self._of(number)), rate)

        return call.layer_by_layer(between)

    def _next(self, rate: float, x: Tensor) -> tuple[float, int]:
        """Rate and number of the next call, on a tensor."""
        number = len(self.calls)
        known = self._known[number] if number < len(self._known) else None
        self.calls.append(known.rate if known is not None and known.told == rate else float(rate))
        return self.calls[-1], number

    def _of(self, number: int) -> str:
        """Which module makes a call, in words."""
        module = self._known[number].module if number < len(self._known) else ""
        return f" of {module}" if module else ""

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
        known = self._known[number].samples_second if number < len(self._known) else x.shape[0] != samples
        second = x.ndim > 1 and samples == x.shape[1] and known
        if not second and (not x.ndim or not samples or x.shape[0] % samples):
            raise ValueError(
                f"dropout{self._of(number)} acts on {tuple(x.shape)}, expected rows for the {samples} samples of the "
                "mini-batch: its masks cannot be frozen per sample; drop --mc-dropout"
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
    least = min(round(rate * 2**32) - 2**31, 2**31 - 1)
    return words(seed, positions, hashed_columns(elements, positions)) >= least


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
        own = own and (not args or output is args[0])  # in evaluation mode it passes its input on, whatever its name
        return masks.stochastic_depth(output, depth_rate(module)) if own else None

    def see_order(module: nn.Module, args: Any) -> None:
        if _active.get() is masks:
            masks.order = order_of(args[0]) if args else None

    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with _hooking:
        handles = [module.register_forward_hook(hook) for module in modules if depth_rate(module)]
        handles += [module.register_forward_pre_hook(see_order) for module in modules if isinstance(module, nn.RNNBase)]
    mask_token, depth_token = _active.set(masks), stochastic_depth.set(masks.stochastic_depth)
    try:
        with masks:
            yield
    finally:
        _active.reset(mask_token)
        stochastic_depth.reset(depth_token)
        with _hooking:
            for handle in handles:
                handle.remove()


class _Listener(FrozenMasks):
    """Lists the rates and shapes of all dropout calls and the modules that make them; drops nothing."""

    def __init__(self) -> None:
        super().__init__(0, torch.zeros(0, dtype=torch.int64))
        self.running: list[nn.Module] = []
        self.shapes: list[torch.Size] = []
        self.made_by: list[nn.Module | None] = []  # of every call

    def _next(self, rate: float, x: Tensor) -> tuple[float, int]:
        super()._next(rate, x)
        self.shapes.append(x.shape)
        self.made_by.append(self.running[-1] if self.running else None)
        return 0.0, len(self.calls) - 1

    def leave(self) -> None:
        self.running.pop()

    def hear(self, model: nn.Module, run: Callable[[], object]) -> "_Listener":
        """Listen to a forward pass."""
        with frozen_masks(model, self):
            run()
        return self


def dropout_calls(
    model: nn.Module, run: Callable[[], object], run_fewer: Callable[[], object] | None = None
) -> list[DropoutCall]:
    """The dropout calls of `run`, a forward pass in evaluation mode.

    An attention module passes its dropout rate to the attention function, and passes 0 in evaluation mode. A second
    pass finds the rate of training mode: in it, only modules that call dropout themselves are in training mode.
    `run_fewer` is a pass with fewer samples, which shows the dimension of the samples.
    """
    plain, training, fewer = _Listener(), _Listener(), _Listener()
    with contextlib.ExitStack() as hooks:
        for module in (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)):
            hooks.enter_context(module.register_forward_pre_hook(lambda m, _: plain.running.append(m)))
            hooks.enter_context(module.register_forward_hook(lambda *_: plain.leave()))
        plain.hear(model, run)
    modes = {module: module.training for module in plain.made_by if module}
    try:
        for module in modes:
            module.training = True
        with contextlib.suppress(Exception):  # of another path through a user's model
            training.hear(model, run)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if run_fewer is not None:
        with contextlib.suppress(Exception):  # of a model for one batch size
            fewer.hear(model, run_fewer)
    rates = training.calls if len(training.calls) == len(plain.calls) else plain.calls
    shapes = fewer.shapes if len(fewer.shapes) == len(plain.shapes) else plain.shapes
    names = {module: name for name, module in model.named_modules()}
    second = [
        len(s) > 1 and s[0] == small[0] and s[1] != small[1] for s, small in zip(plain.shapes, shapes, strict=True)
    ]
    found = zip(plain.calls, rates, second, (names.get(module, "") for module in plain.made_by), strict=True)
    return [DropoutCall(told, told or rate, *rest) for told, rate, *rest in found]


def depth_rate(module: nn.Module) -> float:
    """The rate of a module for stochastic depth; 0 for other modules."""
    name = type(module).__name__
    if not name.endswith("DropPath") and name != "StochasticDepth":
        return 0.0
    return float(getattr(module, "drop_prob", getattr(module, "p", 0.0)) or 0.0)

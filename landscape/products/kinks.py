"""Activation patterns of networks with kinks (ReLU, max pooling): decided in double precision, fixed in single, kept.

The Hessian of a ReLU network jumps where the input of a unit passes zero. In single precision a unit within rounding
of zero lands on either side, depending on the order of its sums: one unit among two million was seen to change an
eigenvalue of a mini-batch by 1e-3 of its size. With the pattern decided in double precision, every way to compute the
Hessian differentiates the same function. In memory stays the pattern of the last mini-batch, or a compact form of all.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.data.structure import Forward, Nested, call_model, map_tensors
from landscape.products.double_precision import CONVOLUTIONS, DoubleCopy, convolution
from landscape.products.hessian_product import differentiable_attention

MOST_BYTES = 2**31  # of the patterns of all mini-batches
ON_DEVICE = 8  # share of an accelerator's free memory that they may take: 1 / 8
Key: TypeAlias = tuple[int, int | None, int | None]  # mini-batch, slice of it


class PatternCache:
    """The activation patterns of mini-batches, as `kinks.activation_pattern` gives them.

    Args:
        device: where those of all mini-batches are kept, a byte per unit and four per maximum of a pooling; None keeps
            the last one as it is.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._patterns: dict[Key, tuple[list[Tensor], torch.device | None]] = {}

    def get(self, key: Key) -> list[Tensor] | None:
        if key not in self._patterns:
            return None
        pattern, device = self._patterns[key]
        return [_expanded(tensor.to(device)) for tensor in pattern] if self._device is not None else pattern

    def put(self, key: Key, pattern: list[Tensor]) -> None:
        if self._device is None:
            self._patterns = {key: (pattern, None)}
            return
        device = pattern[0].device if pattern else None
        self._patterns[key] = [_compact(tensor).to(self._device) for tensor in pattern], device


def compact_bytes(pattern: Sequence[Tensor]) -> int:
    """Bytes that a pattern takes where all mini-batches are kept."""
    return sum(_compact(tensor).nbytes for tensor in pattern)


def cache_of_all(first: Sequence[Tensor], batches: int, device: torch.device) -> PatternCache:
    """An empty cache for the patterns of a number of mini-batches, the `first` given; on the CPU if those are large."""
    size = ON_DEVICE * batches * compact_bytes(first)
    roomy = device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0]
    return PatternCache(device if roomy else torch.device("cpu"))


def _compact(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():  # sides: -1, 0, 1
        return tensor.to(torch.int8)
    return tensor.int() if tensor.numel() and int(tensor.max()) < 2**31 else tensor  # positions of maxima


def _expanded(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.int8 else tensor.long()


LEAST = 1e-30  # distance to a kink at zero of a unit that rounding puts on it; for other kinks a share of their size
ROUNDING = 1e-4  # of the largest input at a kink: units farther away are on the same side in any precision
Points = tuple[float, ...]
_functorch: Any = torch._C._functorch


def _at(*points: float) -> Callable[..., Points]:
    return lambda *_, **__: points


def _bounds(_: Tensor, min: Any = None, max: Any = None) -> Points:
    return tuple(float(bound) for bound in (min, max) if isinstance(bound, int | float))


def _hardtanh(_: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Points:
    return (min_val, max_val)


def _threshold(_: Tensor, threshold: float, value: float, inplace: bool = False) -> Points:
    return (threshold,)


# Elementwise functions whose first or second derivative jumps, and where.
KINKED: Mapping[Any, Callable[..., Points]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _at(0.0)),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu, Tensor.prelu, F.rrelu, F.rrelu_), _at(0.0)),
    **dict.fromkeys((F.elu, F.elu_, F.celu, F.celu_, F.selu, F.selu_, torch.celu, torch.selu), _at(0.0)),
    **dict.fromkeys((torch.abs, Tensor.abs), _at(0.0)),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    **dict.fromkeys((torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip), _bounds),
    **dict.fromkeys((torch.clamp_min, Tensor.clamp_min, Tensor.clamp_min_), _bounds),
    **dict.fromkeys((F.threshold, torch.threshold_, getattr(F, "_threshold", F.threshold)), _threshold),
    **dict.fromkeys((F.hardswish, F.hardsigmoid), _at(-3.0, 3.0)),
    F.relu6: _at(0.0, 6.0),
}
# Max poolings: the function that also returns the positions, and its number of dimensions.
POOLED: Mapping[Any, tuple[Callable[..., tuple[Tensor, Tensor]], int]] = {
    name: (with_indices, dimensions)
    for names, with_indices, dimensions in (
        ((F.max_pool1d, torch.max_pool1d), F.max_pool1d_with_indices, 1),
        ((F.max_pool2d, torch.max_pool2d), F.max_pool2d_with_indices, 2),
        ((F.max_pool3d, torch.max_pool3d), F.max_pool3d_with_indices, 3),
        ((F.adaptive_max_pool1d,), F.adaptive_max_pool1d_with_indices, 1),
        ((F.adaptive_max_pool2d,), F.adaptive_max_pool2d_with_indices, 2),
        ((F.adaptive_max_pool3d,), F.adaptive_max_pool3d_with_indices, 3),
    )
    for name in (*names, with_indices)
}


def has_kinks(model: nn.Module, inputs: Nested, forward: Forward = call_model) -> bool:
    """Whether a forward pass calls a function with kinks that is known here."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        forward(model, inputs)
    return bool(recorder.pattern)


def activation_pattern(
    model: nn.Module, inputs: Nested, forward: Forward = call_model, double: DoubleCopy | None = None
) -> list[Tensor]:
    """The side of its kink of every unit, from a forward pass of a copy of the model in double precision.

    Covers ReLU and its relatives (`KINKED`) and max pooling (`POOLED`), called as functions or by modules of torch.nn;
    other functions are left alone, and so is the model, in evaluation mode. Pass and pattern stay on the model's
    device; consumer GPUs are slow in double precision (a 32nd or 64th of single), which is one pass per mini-batch.
    `double` is the model's copy for several passes.

    Returns:
        One tensor per kink, in the order of the pass: -1, 0 or 1 per unit in single precision; for a max pooling the
        positions of the maxima.

    Raises:
        Exception: whatever the model raises if it cannot be copied or does not run in double precision.
    """
    recorder = _Recorder()
    doubled = map_tensors(inputs, lambda x: x.double() if x.is_floating_point() else x)
    with torch.no_grad(), differentiable_attention(), (double or DoubleCopy(model)).current() as copied, recorder:
        forward(copied, doubled)
    return recorder.pattern


def check_pattern(model: nn.Module, inputs: Nested, pattern: Sequence[Tensor], forward: Forward = call_model) -> None:
    """Reject a pattern that belongs to another function than the model in single precision.

    Raises:
        ValueError: a unit far from its kink would have to change sides, or the model recomputes parts of its forward
            pass in the backward pass, where the pattern cannot be fixed.
    """
    checked = _Checked(pattern)
    with torch.enable_grad(), differentiable_attention(), checked:
        forward(model, inputs)


class _KinkMode(TorchFunctionMode):
    """Intercepts calls of functions with kinks."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function not in KINKED and function not in POOLED:
            return function(*args, **options)
        if not args and "input" in options:
            args = (options.pop("input"),)
        if not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return function(*args, **options)
        if function in POOLED:
            pooling, dimensions = POOLED[function]
            with_indices = bool(options.pop("return_indices", False)) or function is pooling
            maxima, indices = self.pooled(pooling, dimensions, *args, **options)
            return (maxima, indices) if with_indices else maxima
        return self.kinked(function, KINKED[function](*args, **options), *args, **options)

    @abstractmethod
    def kinked(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Any: ...

    @abstractmethod
    def pooled(self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any) -> Any: ...


class _Recorder(_KinkMode):
    """Records the activation pattern of a forward pass; those in double precision have faster convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern: list[Tensor] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in CONVOLUTIONS:
            return convolution(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    def kinked(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Any:
        if _functorch.is_functorch_wrapped_tensor(value):
            raise ValueError("it maps or differentiates a function with kinks within its forward pass")
        self.pattern += [(value - point if point else value).sign().float() for point in points]
        return function(value, *args, **options)

    def pooled(self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        maxima, indices = pooling(value, *args, **options)
        self.pattern.append(indices)
        return maxima, indices


class FixedPattern(_KinkMode):
    """Fixes the `activation_pattern` of one forward pass: an input on the wrong side of a kink is mirrored at it.

    Raises:
        ValueError: the pass has more or fewer kinks than the pattern.
    """

    def __init__(self, pattern: Sequence[Tensor]) -> None:
        super().__init__()
        self._remaining = iter(pattern)

    def kinked(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Any:
        shift = sum(self.shift(value.detach(), point) for point in points)
        in_place = options.get("inplace") or any(a is True for a in args) or function.__name__.endswith("_")
        return function(value.add_(shift) if in_place else value + shift, *args, **options)

    def shift(self, value: Tensor, point: float) -> Tensor:
        """What moves units to their side of a point: exactly zero for all but about one in a million."""
        limits = torch.finfo(value.dtype)
        distance = (value - point if point else value).clamp(limits.min, limits.max)  # infinite inputs stay
        return self.next_sides() * distance.abs().clamp_min(max(LEAST, limits.eps * abs(point))) - distance

    def pooled(self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        indices = self.next_sides()
        maxima = value.flatten(-dimensions).gather(-1, indices.flatten(-dimensions)).view(indices.shape)
        if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
            maxima = maxima.contiguous(memory_format=torch.channels_last)
        return maxima, indices

    def next_sides(self) -> Tensor:
        """The pattern at the next kink."""
        try:
            return next(self._remaining)
        except StopIteration:
            raise _mismatch("more") from None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and next(self._remaining, None) is not None:
            raise _mismatch("fewer")


def _recomputed() -> bool:
    """Whether what is saved for the backward pass has hooks already, such as those that compute it again."""
    node: Any = torch.ones(1, requires_grad=True).square().grad_fn
    try:
        node._raw_saved_self.register_hooks(torch.clone, torch.clone)
    except RuntimeError:
        return True
    return False


class _Checked(FixedPattern):
    def shift(self, value: Tensor, point: float) -> Tensor:
        if _recomputed():
            raise ValueError("it recomputes parts of its forward pass in the backward pass")
        shift = super().shift(value, point)
        finite = value[value.isfinite()]
        if finite.numel() and shift.abs().nan_to_num().max() > ROUNDING * finite.abs().max():
            raise ValueError("in double precision it is another function")
        return shift


def _mismatch(count: str) -> ValueError:
    return ValueError(
        f"the forward pass has {count} kinks than the one in double precision: the model branches on values; "
        "use --kinks single"
    )

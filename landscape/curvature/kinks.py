"""On which side of its kinks a network is: decided in double precision, and held in single.

The Hessian of a ReLU network jumps where the input of a unit passes zero. Single precision puts a unit that is within
rounding of zero on either side, another one for every order of its sums: an eigenvalue of a mini-batch was seen to
change by 1e-3 of its size for one unit among two million. Once they are decided in double precision, all ways
of computing it are those of one and the same function.
"""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from landscape.curvature.hessian_product import differentiable_attention

LEAST = 1e-30  # how far from a kink at zero a unit is put that rounding leaves on it; from others a share of their size
ROUNDING = 1e-4  # of the largest input at a kink: what is farther from it lies on its own side in any precision
Points = tuple[float, ...]
_functorch: Any = torch._C._functorch
_saving: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignoring: None)


def _at(*points: float) -> Callable[..., Points]:
    return lambda *_, **__: points


def _both_ends(_: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Points:
    return (min_val, max_val)


def _bounds(_: Tensor, min: Any = None, max: Any = None) -> Points:
    return tuple(float(bound) for bound in (min, max) if isinstance(bound, int | float))


def _threshold(_: Tensor, threshold: float, value: float, inplace: bool = False) -> Points:
    return (threshold,)


# Functions of one number whose first or second derivative jumps, and where.
BENT: Mapping[Any, Callable[..., Points]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _at(0.0)),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_, F.prelu, torch.prelu, Tensor.prelu, F.rrelu, F.rrelu_), _at(0.0)),
    **dict.fromkeys((F.elu, F.elu_, F.celu, F.celu_, F.selu, F.selu_, torch.celu, torch.selu), _at(0.0)),
    **dict.fromkeys((torch.abs, Tensor.abs), _at(0.0)),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _both_ends),
    **dict.fromkeys((torch.clamp, torch.clamp_, Tensor.clamp, Tensor.clamp_, torch.clip, Tensor.clip), _bounds),
    **dict.fromkeys((torch.clamp_min, Tensor.clamp_min, Tensor.clamp_min_), _bounds),
    **dict.fromkeys((F.threshold, torch.threshold_, getattr(F, "_threshold", F.threshold)), _threshold),
    **dict.fromkeys((F.hardswish, F.hardsigmoid), _at(-3.0, 3.0)),
    F.relu6: _at(0.0, 6.0),
}
# Poolings that take the largest: the function that says where it is too, and of how many dimensions.
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


def bends(model: nn.Module, inputs: Tensor) -> bool:
    """Whether a forward pass comes to a kink known here."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        model(inputs)
    return bool(recorder.found)


def sides(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """On which side of every kink the units of a network are, by a forward pass of a copy in double precision.

    Those of ReLU and its relatives (`BENT`) and of max pooling (`POOLED`), called by these functions or the modules of
    torch.nn that do; other functions are left as they are.

    Args:
        model: in evaluation mode; stays as it is.
        inputs: (N, ...).

    Returns:
        In the order in which the pass comes to them, a tensor per kink: -1, 0 or 1 per unit, in single precision, or
        of a max pooling the positions of the largest.

    Raises:
        Exception: whatever a model raises that cannot be copied or does not run in double precision.
    """
    recorder = _Recorder()
    with torch.no_grad(), differentiable_attention(), recorder:
        _in_double(model)(_double(inputs))
    return recorder.found


def refuse_another(model: nn.Module, inputs: Tensor, decided: Sequence[Tensor]) -> None:
    """Refuse sides that belong to another function than the model's own in single precision.

    Raises:
        ValueError: a unit far from its kink would have to change its side, or passes are made anew behind it, in
            backward passes, where nothing holds it.
    """
    checked = _Checked(decided)
    with torch.enable_grad(), differentiable_attention(), checked:
        model(inputs)


def _in_double(model: nn.Module) -> nn.Module:
    """A copy whose floating-point weights and buffers were never copied in single precision."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    doubled: dict[int, Any] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            made = tensor.detach().to(torch.float64, copy=True)
            weight = isinstance(tensor, nn.Parameter)
            doubled[id(tensor)] = nn.Parameter(made, requires_grad=False) if weight else made
    return copy.deepcopy(model, doubled)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _AtKinks(TorchFunctionMode):
    """Takes the place of the functions that have kinks."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function not in BENT and function not in POOLED:
            return function(*args, **options)
        if not args and "input" in options:
            args = (options.pop("input"),)
        if not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return function(*args, **options)
        if function in POOLED:
            pooling, dimensions = POOLED[function]
            wanted = bool(options.pop("return_indices", False)) or function is pooling
            found, where = self.pooled(pooling, dimensions, *args, **options)
            return (found, where) if wanted else found
        return self.bent(function, BENT[function](*args, **options), *args, **options)

    @abstractmethod
    def bent(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Tensor: ...

    @abstractmethod
    def pooled(
        self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]: ...


class _Recorder(_AtKinks):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def bent(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Tensor:
        if _functorch.is_functorch_wrapped_tensor(value):
            raise ValueError("it maps or differentiates a function with kinks within its forward pass")
        self.found += [(value - point).sign_().float() for point in points]
        found: Tensor = function(value, *args, **options)
        return found

    def pooled(self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        found, where = pooling(value, *args, **options)
        self.found.append(where)
        return found, where


class Held(_AtKinks):
    """Within it a forward pass has its units on the sides given: an input on the other one is mirrored at the kink.

    Args:
        sides: those of `sides` for the same model and inputs.

    Raises:
        ValueError: the pass comes to more or fewer kinks.
    """

    def __init__(self, sides: Sequence[Tensor]) -> None:
        super().__init__()
        self._left = iter(sides)

    def bent(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Tensor:
        shift = sum(self.shift(value.detach(), point) for point in points)
        in_place = options.get("inplace") or any(a is True for a in args) or function.__name__.endswith("_")
        found: Tensor = function(value.add_(shift) if in_place else value + shift, *args, **options)
        return found

    def shift(self, value: Tensor, point: float) -> Tensor:
        """What puts units on their sides of a point: exactly nothing but for about one in a million."""
        limits = torch.finfo(value.dtype)
        distance = (value - point if point else value).clamp(limits.min, limits.max)  # infinite ones have none
        return self.decided() * distance.abs().clamp_min(max(LEAST, limits.eps * abs(point))) - distance

    def pooled(self, pooling: Any, dimensions: int, value: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        where = self.decided()
        found = value.flatten(-dimensions).gather(-1, where.flatten(-dimensions)).view(where.shape)
        if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
            found = found.contiguous(memory_format=torch.channels_last)
        return found, where

    def decided(self) -> Tensor:
        """The sides of the next kink."""
        try:
            return next(self._left)
        except StopIteration:
            raise _other("more") from None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and next(self._left, None) is not None:
            raise _other("fewer")


class _Checked(Held):
    def shift(self, value: Tensor, point: float) -> Tensor:
        if _saving(True) is not None:
            raise ValueError("it makes parts of its forward pass anew in the backward pass")
        found = super().shift(value, point)
        finite = value[value.isfinite()]
        if finite.numel() and found.abs().nan_to_num().max() > ROUNDING * finite.abs().max():
            raise ValueError("in double precision it is another function")
        return found


def _other(count: str) -> ValueError:
    return ValueError(
        f"a forward pass came to {count} kinks than the one in double precision: the model branches on values; "
        "ask for --kinks single"
    )

"""On which side of its kinks a network is: decided in double precision, and held in single.

The Hessian of a ReLU network jumps where the input of a unit passes zero. Single precision puts a unit that is within
rounding of zero on either side, another one in every library and on every device: an eigenvalue of a mini-batch was
seen to change by 1e-3 of its size for one unit among two million. Once they are decided in double precision, all ways
of computing it are those of one and the same function.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from landscape.linalg.hessian import differentiable_attention

LEAST = 1e-30  # how far from a kink at zero a unit is put that rounding leaves on it; from others a share of their size
Points = tuple[float, ...]


def _zero(*_: Any, **__: Any) -> Points:
    return (0.0,)


def _both_ends(_: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Points:
    return (min_val, max_val)


# Functions of one number with kinks, and where they have them.
BENT: Mapping[Any, Callable[..., Points]] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _zero),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _zero),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _both_ends),
    F.relu6: lambda *_, **__: (0.0, 6.0),
}
POOLED = (F.max_pool2d, torch.max_pool2d)


def bends(model: nn.Module, inputs: Tensor) -> bool:
    """Whether a forward pass comes to a kink known here; one sample will do."""
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        model(inputs)
    return bool(recorder.found)


def sides(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """On which side of every kink the units of a network are, by a forward pass in double precision.

    Those of ReLU, leaky ReLU, ReLU6, hardtanh and two-dimensional max pooling; other functions are left as they are.

    Args:
        model: in evaluation mode; stays as it is.
        inputs: (N, ...).

    Returns:
        In the order in which the pass comes to them, a tensor per kink: -1, 0 or 1 per unit, in single precision, or
        of a max pooling the positions of the largest.

    Raises:
        RuntimeError: the model does not run in double precision.
    """
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    doubled = {name: _double(tensor.detach()) for name, tensor in tensors}
    recorder = _Recorder()
    with torch.no_grad(), differentiable_attention(), recorder:
        functional_call(model, doubled, (_double(inputs),))
    return recorder.found


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class _AtKinks(TorchFunctionMode):
    """Takes the place of the functions that have kinks."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if not args and "input" in options:
            args = (options.pop("input"),)
        if function in BENT:
            return self.bent(function, BENT[function](*args, **options), *args, **options)
        if function in POOLED and not options.get("return_indices"):
            return self.pooled(*args, **options)
        return function(*args, **options)

    @abstractmethod
    def bent(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Tensor: ...

    @abstractmethod
    def pooled(self, value: Tensor, *args: Any, **options: Any) -> Tensor: ...


class _Recorder(_AtKinks):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def bent(self, function: Any, points: Points, value: Tensor, *args: Any, **options: Any) -> Tensor:
        self.found += [(value - point).sign_().float() for point in points]
        found: Tensor = function(value, *args, **options)
        return found

    def pooled(self, value: Tensor, *args: Any, **options: Any) -> Tensor:
        found, where = F.max_pool2d_with_indices(value, *args, **options)
        self.found.append(where)
        return found


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
        moved = value
        for point in points:
            distance = value.detach() - point if point else value.detach()
            least = max(LEAST, torch.finfo(value.dtype).eps * abs(point))
            # Exactly nothing is added to nearly all: about one unit in a million is on the other side.
            moved = moved + (self._next() * distance.abs().clamp_min(least) - distance)
        found: Tensor = function(moved, *args, **options)
        in_place = options.get("inplace") or any(a is True for a in args) or function.__name__.endswith("_")
        return value.copy_(found) if in_place else found

    def pooled(self, value: Tensor, *args: Any, **options: Any) -> Tensor:
        where = self._next()
        return value.flatten(-2).gather(-1, where.flatten(-2)).view(where.shape)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and next(self._left, None) is not None:
            raise _other("fewer")

    def _next(self) -> Tensor:
        try:
            return next(self._left)
        except StopIteration:
            raise _other("more") from None


def _other(count: str) -> ValueError:
    return ValueError(
        f"a forward pass came to {count} kinks than the one in double precision: the model branches on values; "
        "ask for --kinks single"
    )

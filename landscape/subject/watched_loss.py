"""Watch a call of a user's loss: how PyTorch reduces it, and outputs (N, 1) that meet targets (N,)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from landscape.data.structure import Nested, tensors_in


def reduction(function: Callable[[Any, Any], Any], first: Any, second: Nested, *, calls_model: bool = False) -> str:
    """The reduction (`none`, `sum`, `mean`) of the call of PyTorch that returns the loss; "" where none does.

    Of a loss that calls the model, whose layers broadcast as they need, the tensors of the batch alone are watched.

    Raises:
        UserWarning: PyTorch makes N x N losses of N outputs and N targets.
    """
    pairs = _Pairs({tensor.data_ptr() for tensor in tensors_in(second)} if calls_model else None)
    calls = _Calls()
    try:
        with pairs, calls:
            found = function(first, second)
    except Exception:  # a loss that works unwatched
        return ""
    if pairs.met:
        raise UserWarning(pairs.met)
    return next((how for value, how in calls.returned if value is found), "")


class _Pairs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices an elementwise operation of tensors (N, 1) and (N,)."""

    def __init__(self, watched: set[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met, self._watched = "", watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        n = len(result) if isinstance(result, Tensor) and result.dim() == 2 else 0
        if n > 1 and result.shape == (n, n):
            tensors = [one for one in args if isinstance(one, Tensor)]
            flat = [one for one in tensors if one.shape == (n,)]
            if self._watched is not None:
                flat = [one for one in flat if one.data_ptr() in self._watched]
            if flat and any(one.shape == (n, 1) for one in tensors):
                self.met = f"shapes ({n}, 1) and ({n},) become ({n}, {n})"
        return result


class _Calls(TorchFunctionMode):
    """Keeps what each call of PyTorch returned that has a reduction, and which."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[tuple[Tensor, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        how = (kwargs or {}).get("reduction")
        if how is None and getattr(func, "__name__", "") == "sum" and isinstance(result, Tensor) and not result.dim():
            how = "sum"
        if isinstance(how, str):
            self.returned.append((result, how))
        return result

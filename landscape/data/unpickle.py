"""Pickled CIFAR batches, read without giving the pickle anything that it could misuse."""

from __future__ import annotations

import _codecs
import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


class _Dtype:
    """Stand-in for a numpy dtype of plain numbers."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = _text(state[1])

    def decoded(self, raw: bytes) -> np.ndarray:
        values: np.ndarray = np.frombuffer(raw, np.dtype(self.order + self.code))
        return values


class _Array:
    """Stand-in for a numpy array: keeps the state that the pickle gives it."""

    __slots__ = ("state",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self) -> np.ndarray:
        _, shape, dtype, columns_first, raw = self.state
        flat: np.ndarray = dtype.decoded(raw)
        if math.prod(shape) != flat.size:
            raise ValueError(f"an array of shape {shape} with {flat.size} values")
        return flat.reshape(shape, order="F" if columns_first else "C")


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _dtype(code: str | bytes, _align: int, _copy: int) -> _Dtype:
    if not re.fullmatch(r"[biuf][1248]", _text(code)):
        raise ValueError(f"an array of type {_text(code)!r}, expected plain numbers")
    return _Dtype(_text(code))


def _reconstruct(_kind: str, _shape: object, _code: object) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, raw: bytes) -> int | float:
    return dtype.decoded(raw)[0].item()  # type: ignore[no-any-return]


# Every name the official files use, in the spellings of numpy 1 and 2, and Python's own for bytes. What
# stands behind numpy's names is ours: numpy.ndarray itself, called by a pickle with dtype "O" and a buffer,
# follows the buffer's bytes as pointers.
ALLOWED: Mapping[str, Callable[..., Any] | str] = {
    "numpy.ndarray": "ndarray",
    "numpy.dtype": _dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "_codecs.encode": _codecs.encode,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for the global {module}.{name}, which is refused")
        return ALLOWED[f"{module}.{name}"]


def batch(path: Path) -> dict[str, Any]:
    """The dict of one batch file: str keys, arrays as numpy arrays, byte strings of Python 2 as bytes.

    Raises:
        ValueError: the file is damaged, names a global outside `ALLOWED`, or holds no dict.
    """
    try:
        content = _Restricted(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return {_text(key): v.value() if isinstance(v, _Array) else v for key, v in content.items()}
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path} is not a CIFAR batch: {reason}; expected a dict of numpy arrays and lists; get the file anew"
        ) from None

"""Pickles read with inert stand-ins for everything they name: nothing of another module is ever imported or called."""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np


class Dtype:
    """Stands for a numpy dtype, of which only plain numbers have values."""

    __slots__ = ("code", "order")

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code, self.order = text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = text(state[1])

    def decoded(self, raw: bytes) -> np.ndarray:
        """Numbers from their bytes.

        Raises:
            ValueError: they are no plain numbers.
        """
        values: np.ndarray = np.frombuffer(raw, np.dtype(self.checked().order + self.code))
        return values

    def checked(self) -> Dtype:
        """Itself.

        Raises:
            ValueError: it is no type of plain numbers.
        """
        if not re.fullmatch(r"[biuf][1248]", self.code) or self.order not in ("|", "<", ">", "="):
            raise ValueError(f"an array of type {self.code!r}, expected plain numbers")
        return self


class Array:
    """Stands for a numpy array: keeps the state that the pickle gives it.

    numpy's own, called by a pickle with dtype "O" and a buffer, follows the buffer's bytes as pointers.
    """

    __slots__ = ("state",)

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self) -> np.ndarray:
        """The array.

        Raises:
            ValueError: it does not hold the numbers that its shape says, or no numbers.
        """
        _, shape, dtype, columns_first, raw = self.state
        flat: np.ndarray = dtype.decoded(raw)
        if math.prod(shape) != flat.size:
            raise ValueError(f"an array of shape {shape} with {flat.size} values")
        return flat.reshape(shape, order="F" if columns_first else "C")


def scalar(dtype: Dtype, raw: object = b"") -> int | float | None:
    """A number of numpy's as Python's; None for anything else that numpy keeps."""
    try:
        return dtype.decoded(raw)[0].item()  # type: ignore[no-any-return, arg-type]
    except (ValueError, TypeError, IndexError, AttributeError):
        return None


def reconstruct(*_: object) -> Array:
    """An array that has yet to be given its state."""
    return Array()


def text(value: str | bytes) -> str:
    """A word of Python 2 or 3."""
    return value.decode("ascii") if isinstance(value, bytes) else value


# numpy's names in the spellings of versions 1 and 2
NUMPY: Mapping[str, Callable[..., Any]] = {
    "numpy.ndarray": Array,
    "numpy.dtype": Dtype,
    "numpy.core.multiarray._reconstruct": reconstruct,
    "numpy._core.multiarray._reconstruct": reconstruct,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
}


class Inert:
    """Stands for any other object or function: may be called, filled and given a state, and does nothing."""

    named = ""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...

    def add(self, value: object) -> None: ...


class Unpickler(pickle._Unpickler):
    """Python's own unpickler with a table of what stands for which name; `named` is what the pickle asked for.

    The one written in Python: the other's memo is an array that one opcode can make as long as memory.

    Args:
        stream: the pickle.
        stand_ins: for names; for all others a class of `Inert`.
        persistent: for what lies outside the pickle, by its description.
        encoding: of the byte strings of Python 2.
    """

    def __init__(
        self,
        stream: io.BufferedIOBase,
        stand_ins: Mapping[str, Callable[..., Any] | str],
        persistent: Callable[[Any], Any] | None = None,
        encoding: str = "ASCII",
    ) -> None:
        super().__init__(stream, encoding=encoding)
        self._stand_ins, self._persistent = stand_ins, persistent
        self.named: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        full = f"{module}.{name}"
        self.named[full] = None
        return self._stand_ins[full] if full in self._stand_ins else type("Inert", (Inert,), {"named": full})

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a thing outside the pickle."""
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something outside")
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        """Refuse a name from Python's registry of numbers, which belongs to this process."""
        raise pickle.UnpicklingError("it names something by a number of this process")

    def _build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it gives a state to a function or a class")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

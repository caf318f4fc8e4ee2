"""Read pickles with inert stand-ins for everything they name: no other module is ever imported or called."""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np


class Dtype:
    """Stands for a numpy dtype; only arrays of plain numbers can be decoded."""

    __slots__ = ("code", "order")

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code, self.order = text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = text(state[1])

    def decoded(self, raw: bytes) -> np.ndarray:
        """Numbers from their bytes.

        Raises:
            ValueError: the type is not one of plain numbers.
        """
        return np.frombuffer(raw, np.dtype(self.checked().order + self.code))

    def checked(self) -> Dtype:
        """The dtype itself, if it is one of plain numbers.

        Raises:
            ValueError: it is not.
        """
        if not re.fullmatch(r"[biuf][1248]", self.code) or self.order not in ("|", "<", ">", "="):
            raise ValueError(f"an array of type {self.code!r}, expected plain numbers")
        return self


class Array:
    """Stands for a numpy array and keeps the state that the pickle sets.

    numpy's own class would follow the bytes of a buffer as pointers if the pickle said dtype "O".
    """

    __slots__ = ("state",)

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def value(self) -> np.ndarray:
        """The array.

        Raises:
            ValueError: the number of values differs from the shape, or they are not plain numbers.
        """
        _, shape, dtype, columns_first, raw = self.state
        flat: np.ndarray = dtype.decoded(raw)
        if math.prod(shape) != flat.size:
            raise ValueError(f"an array of shape {shape} with {flat.size} values")
        return flat.reshape(shape, order="F" if columns_first else "C")


def scalar(dtype: Dtype, raw: object = b"") -> int | float | None:
    """A numpy scalar as a Python number; None if it is not a number."""
    try:
        return dtype.decoded(raw)[0].item()  # type: ignore[no-any-return, arg-type]
    except (ValueError, TypeError, IndexError, AttributeError):
        return None


def text(value: str | bytes) -> str:
    """A string pickled by Python 2 or 3."""
    return value.decode("ascii") if isinstance(value, bytes) else value


NUMPY: Mapping[str, Callable[..., Any]] = {
    "numpy.ndarray": Array,
    "numpy.dtype": Dtype,
    **{f"numpy.{core}.multiarray._reconstruct": Array for core in ("core", "_core")},  # in numpy 1 and 2
    **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
}


class Inert:
    """Stands for any other object or function: accepts calls, items and a state, and does nothing."""

    named = ""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, *_: object) -> None: ...

    __setitem__ = append = extend = add = __setstate__


class Unpickler(pickle._Unpickler):
    """Python's unpickler with a table of stand-ins by name; other names become subclasses of `Inert`.

    The implementation in Python is used because in the one in C a single opcode can grow the memo to all memory.
    `persistent` returns objects outside the pickle, by persistent id; `named` collects the names in the pickle.
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
        """The stand-in of a name."""
        full = f"{module}.{name}"
        self.named[full] = None
        return self._stand_ins[full] if full in self._stand_ins else type("Inert", (Inert,), {"named": full})

    def persistent_load(self, pid: Any) -> Any:
        """The stand-in of an object outside the pickle."""
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to an object outside the pickle")
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        """Refuse names by extension code: the registry belongs to this process."""
        raise pickle.UnpicklingError("it names an object by extension code")

    def _build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it sets the state of a function or a class")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

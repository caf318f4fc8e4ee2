"""Read pickles with inert stand-ins for everything they name: no other module is ever imported or called."""

from __future__ import annotations

import argparse
import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from landscape.checkpoints.pickle_bounds import Budget, check_content

DIMENSIONS = 64  # of an array, as numpy's


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
        if not isinstance(shape, tuple) or len(shape) > DIMENSIONS or not all(type(n) is int for n in shape):
            raise ValueError("an array whose shape is not a few whole numbers")
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
        start = stream.tell()
        self._size = stream.seek(0, io.SEEK_END)
        stream.seek(start)
        self.budget = Budget(self._size)
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

    def load(self) -> Any:
        """The content of the pickle.

        Raises:
            UnpicklingError: it is damaged, or asks for more than it can hold.
        """
        content = super().load()
        check_content(content, self._size)
        return content

    def _instantiate(self, kind: Any, arguments: Any) -> None:  # of INST and OBJ
        self.budget.call(kind, arguments)
        super()._instantiate(kind, arguments)  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch}


def _build(unpickler: Any) -> None:
    """Before BUILD: states are those of objects that take one, none of a function, a class or a shape."""
    instance, state = unpickler.stack[-2:]
    if callable(instance) or not (hasattr(instance, "__setstate__") or isinstance(instance, dict | argparse.Namespace)):
        raise pickle.UnpicklingError("it sets the state of a function, a class or a plain value")
    for part in state if isinstance(state, tuple) else [state]:
        unpickler.budget.copy(part)


def _call(unpickler: Any) -> None:
    function, arguments = unpickler.stack[-2:]
    unpickler.budget.call(function, arguments)


def _checked(before: Callable[[Any], None], opcode: int) -> Callable[[Any], None]:
    load = pickle._Unpickler.dispatch[opcode]

    def step(unpickler: Any) -> None:
        before(unpickler)
        load(unpickler)

    return step


# The stack holds the values since the last mark.
CHECKS: Mapping[bytes, Callable[[Any], None]] = {
    pickle.SETITEM: lambda u: u.budget.keys(u.stack[-2:-1]),
    **dict.fromkeys((pickle.SETITEMS, pickle.DICT), lambda u: u.budget.keys(u.stack[::2])),
    **dict.fromkeys((pickle.ADDITEMS, pickle.FROZENSET), lambda u: u.budget.keys(u.stack)),
    **dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ), _call),
    pickle.NEWOBJ_EX: lambda u: u.budget.call(u.stack[-3], [u.stack[-2], u.stack[-1]]),
    pickle.BUILD: _build,
}
Unpickler.dispatch.update({opcode[0]: _checked(check, opcode[0]) for opcode, check in CHECKS.items()})

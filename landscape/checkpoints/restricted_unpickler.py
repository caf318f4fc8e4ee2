"""Read pickles with inert stand-ins for everything they name: no other module is ever imported or called.

What a pickle may ask for has bounds. A container that is held twice by one that is held twice by another, and so on,
takes three bytes per level and doubles with each: to hash it, to compare it or to print it never ends. So does putting
many keys of one hash into a dict.
"""

import argparse
import io
import math
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

import numpy as np

KEY_PARTS = 64  # values in a key that is a tuple, with those of tuples in it
TUPLE_KEYS = 10_000  # keys of a file that are tuples; numbers can be chosen so that their tuples have one hash
KEY_BITS = 64  # of a whole number that is a key; larger ones can have one hash too
INTEGER_BITS = 8192  # of a whole number; random number generators store up to 128
DEPTH = 100  # of containers in containers
COPIES = 4  # how often arguments of calls may repeat what a pickle holds
SLACK = 2**18  # values below which neither copies nor shared containers matter
KEYS = (str, bytes, float, type(None), type, PurePath)  # beside whole numbers, tuples, and what is compared by identity
CONTAINERS = (list, tuple, dict, set, frozenset)


class BoundError(pickle.UnpicklingError):
    """A pickle asks for more than anybody needs."""


class Budget:
    """What one pickle of so many bytes may still use."""

    def __init__(self, size: int) -> None:
        self._room, self._tuples = COPIES * size + SLACK, TUPLE_KEYS

    def keys(self, keys: Iterable[Any]) -> None:
        """Accept keys of a dict or a set. Raises BoundError: hashing or comparing them could take for ever."""
        for key in keys:
            if isinstance(key, tuple):
                self._tuples -= 1
                if self._tuples < 0:
                    raise BoundError(f"more than {TUPLE_KEYS:,} keys that are tuples")
            _check_key(key)

    def call(self, function: Any, arguments: Any) -> None:
        """Accept a call.

        Raises:
            BoundError: it makes a dict or a set of unacceptable keys, or its arguments, with all that is in them, add
                up to far more than the pickle holds.
        """
        waiting = [arguments]
        while waiting:
            value = waiting.pop()
            self.copy(value)
            waiting += [item for item in _inside(value) if isinstance(item, (*CONTAINERS, str, bytes))]
        if isinstance(function, type) and issubclass(function, dict | set):
            for values in arguments:
                if isinstance(values, list | tuple):
                    pairs = issubclass(function, dict)
                    self.keys(v[0] if pairs and isinstance(v, list | tuple) and v else v for v in values)

    def copy(self, value: Any) -> None:
        """Accept a copy of a value. Raises BoundError: with those before it holds far more than the pickle."""
        self._room -= 1 + (len(value) if isinstance(value, (*CONTAINERS, str, bytes)) else 0)
        if self._room < 0:
            raise BoundError("it copies far more values than it holds")


def check_content(content: Any, size: int) -> None:
    """Accept plain data from a pickle of so many bytes, if it can be walked through, printed and compared.

    Raises:
        BoundError: containers are nested too deeply, or hold one another so often that they expand without end.
    """
    room = COPIES * size + SLACK
    seen: dict[int, tuple[int, int]] = {}  # container -> values in it and in the containers in it, levels of them
    stack: list[tuple[Any, list[Any] | None]] = [(content, None)]
    while stack:
        value, inside = stack.pop()
        if inside is None:
            inside = _inside(value)
            if inside and id(value) not in seen:
                seen[id(value)] = 0, 0  # while it is walked through
                stack.append((value, inside))
                stack += [(item, None) for item in inside if isinstance(item, (*CONTAINERS, argparse.Namespace))]
            elif isinstance(value, int) and value.bit_length() > INTEGER_BITS:
                raise BoundError(f"a whole number of {value.bit_length():,} bits")
            continue
        held = [seen.get(id(item), (0, 0)) for item in inside if isinstance(item, (*CONTAINERS, argparse.Namespace))]
        count, depth = len(inside) + sum(n for n, _ in held), 1 + max((levels for _, levels in held), default=0)
        if depth > DEPTH:
            raise BoundError(f"containers nested more than {DEPTH} deep")
        if count > room:
            raise BoundError("containers that hold one another so often that they expand without end")
        seen[id(value)] = count, depth


def _inside(value: Any) -> list[Any]:
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, CONTAINERS) else []


def _check_key(key: Any) -> None:
    parts, count = [key], 0
    while parts:
        part, count = parts.pop(), count + 1
        if count > KEY_PARTS:
            raise BoundError(f"a key of more than {KEY_PARTS} values")
        if isinstance(part, tuple):
            parts += part[: KEY_PARTS + 1]
        elif isinstance(part, int):
            if part.bit_length() > KEY_BITS:
                raise BoundError(f"a key of {part.bit_length()} bits")
        elif getattr(type(part), "__hash__", None) != object.__hash__ and not isinstance(part, KEYS):
            raise BoundError(f"a key of type {type(part).__name__}")


DIMENSIONS = 64  # of an array, as numpy's


class Dtype:
    """Stands for a numpy dtype; only arrays of plain numbers can be decoded."""

    __slots__ = ("code", "order")

    def __init__(self, code: str | bytes = "", *_: object) -> None:
        self.code, self.order = text(code), "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = text(state[1])

    def decoded(self, raw: bytes) -> np.ndarray:
        """Numbers from their bytes. Raises ValueError: the type is not one of plain numbers."""
        return np.frombuffer(raw, np.dtype(self.checked().order + self.code))

    def checked(self) -> "Dtype":
        """The dtype itself, if it is one of plain numbers. Raises ValueError: it is not."""
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
        """The array. Raises ValueError: the number of values differs from the shape, or they are not plain numbers."""
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

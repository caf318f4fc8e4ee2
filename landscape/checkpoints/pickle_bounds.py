"""Bounds on what a pickle may ask for: a few bytes in it can stand for more work or memory than there is.

A container that is held twice by one that is held twice by another, and so on, takes three bytes per level and doubles
with each: to hash it, to compare it or to print it never ends. So does putting many keys of one hash into a dict.
"""

import argparse
import pickle
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

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
        """Accept keys of a dict or a set.

        Raises:
            BoundError: hashing or comparing them could take for ever.
        """
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
        """Accept a copy of a value.

        Raises:
            BoundError: with those before it holds far more than the pickle.
        """
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

"""Arguments of a model: words of a command line and lists of a checkpoint as its constructor wants them."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from landscape.options import OptionError

LEAST = {"msa": 0}  # every other whole number counts something a network cannot do without
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def converted(name: str, value: object, kind: Any) -> object:
    """The value as its annotation wants it.

    Args:
        name: of the argument, for messages.
        value: as given: of the right type, or its words ("4", "0,1,1,2", "true", "none"), or a list.
        kind: the annotation: `int`, `float` (always a rate in [0, 1)), `bool`, `tuple[int, ...]`, a `Literal`
            of words, or one of them `| None`.

    Raises:
        OptionError: naming the argument, what was got and what is expected.
    """
    if type(None) in get_args(kind):
        if value is None or str(value).lower() == "none":
            return None
        kind = next(member for member in get_args(kind) if member is not type(None))
        try:
            return converted(name, value, kind)
        except OptionError as error:
            raise OptionError(f"{error}, or none") from None
    if get_origin(kind) is Literal:
        return _choice(name, value, get_args(kind))
    if get_origin(kind) is tuple:
        return _numbers(name, value)
    if kind is bool:
        return _switch(name, value)
    return _rate(name, value) if kind is float else whole(name, value)


def whole(name: str, value: object) -> int:
    """A whole number of at least 1 (of at least 0 where `LEAST` says so).

    Raises:
        OptionError: it is none.
    """
    number = _number(value)
    if number is None or number < LEAST.get(name, 1):
        raise OptionError(f"{name}={value} is out of range; ask for a whole number, at least {LEAST.get(name, 1)}")
    return number


def _number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _numbers(name: str, value: object) -> tuple[int, ...]:
    words = value.strip("()[] ").rstrip(",").split(",") if isinstance(value, str) else value
    entries = list(words) if isinstance(words, list | tuple) else [words]
    if not entries:
        raise OptionError(f"{name}={value} is empty; ask for one whole number per stage, such as 2,2,2,2")
    return tuple(whole(name, entry) for entry in entries)


def _rate(name: str, value: object) -> float:
    try:
        rate = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError:
        rate = float("nan")
    if not 0.0 <= rate < 1.0:
        raise OptionError(f"{name}={value} is out of range; ask for a number from 0 up to, not including, 1")
    return rate


def _switch(name: str, value: object) -> bool:
    answer = TRUTH.get(str(value).lower())
    if answer is None:
        raise OptionError(f"{name}={value} is neither true nor false; ask for one of them")
    return answer


def _choice(name: str, value: object, choices: tuple[str, ...]) -> object:
    if value not in choices:
        raise OptionError(f"{name}={value} is not known; ask for one of {', '.join(choices)}")
    return value

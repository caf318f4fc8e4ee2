"""Convert model arguments, text of a command line or lists of a checkpoint, to the types that the constructor takes."""

from typing import Any, Literal, get_args, get_origin

from landscape.options import BOOLEANS, OptionError, alternatives

MOST_STAGES = 100
MOST = dict.fromkeys(("depth", "depths", "blocks", "msa"), 1_000)  # layers: each takes a moment to make
LEAST = {"msa": 0}  # every other whole number counts something a network cannot do without


def converted(name: str, value: object, kind: Any) -> object:
    """Convert a value, which may be text ("4", "0,1,1,2", "true", "none") or a list, to the type of its annotation.

    The annotation is `int`, `float` (always a rate in [0, 1)), `bool`, `tuple[int, ...]`, a `Literal` of words, or one
    of them `| None`.

    Raises:
        OptionError: it cannot be converted, or is out of range.
    """
    if type(None) in get_args(kind):
        if value is None or str(value).lower() == "none":
            return None
        kind = next(member for member in get_args(kind) if member is not type(None))
        try:
            return converted(name, value, kind)
        except OptionError as error:
            raise OptionError(f"{error} (none is valid too)") from None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _invalid(name, value, alternatives(get_args(kind)))
        return value
    if get_origin(kind) is tuple:
        words = value.strip("()[] ").rstrip(",").split(",") if isinstance(value, str) else value
        entries = words if isinstance(words, list | tuple) else [words]
        if not 0 < len(entries) <= MOST_STAGES:
            raise _invalid(name, value, "one whole number per stage, such as 2,2,2,2")
        return tuple(whole_number(name, entry) for entry in entries)
    if kind is bool:
        if str(value).lower() not in BOOLEANS:
            raise _invalid(name, value, "true or false")
        return BOOLEANS[str(value).lower()]
    return _rate(name, value) if kind is float else whole_number(name, value)


def whole_number(name: str, value: object) -> int:
    """Convert a whole number of at least 1 (of at least 0 where `LEAST` says so).

    Raises:
        OptionError: it is none.
    """
    least = LEAST.get(name, 1)
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else least - 1
    except ValueError:
        number = least - 1
    if number < least:
        raise _invalid(name, value, f"a whole number of at least {least}")
    if number > MOST.get(name, number):
        raise _invalid(name, value, f"at most {MOST[name]:,}")
    return number


def _rate(name: str, value: object) -> float:
    try:
        rate = float(value) if isinstance(value, int | float | str) else float("nan")
    except ValueError:
        rate = float("nan")
    if not 0.0 <= rate < 1.0:
        raise _invalid(name, value, "a number of at least 0 and below 1")
    return rate


def _invalid(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{name} must be {expected}, got {value}")

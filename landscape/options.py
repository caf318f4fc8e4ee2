"""The error of a parameter outside its range, and the checks and parsers that options share."""

from __future__ import annotations

import re
from collections.abc import Iterable


class OptionError(ValueError):
    """A parameter outside its range, whatever the subject: a usage error (exit code 2 on the command line)."""


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a parameter below its range.

    Raises:
        OptionError: naming the parameter, what was got and what is expected.
    """
    if not value >= least:
        raise OptionError(f"--{name.replace('_', '-')} {value} is out of range; ask for at least {least}")


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a parameter that is none of the choices.

    Raises:
        OptionError: naming the parameter, what was got and what is expected.
    """
    known = list(choices)
    if value not in known:
        raise OptionError(f"--{name.replace('_', '-')} {value} is unknown; ask for one of {', '.join(known)}")


def regular_expression(name: str, text: str) -> None:
    """Refuse a parameter that is no regular expression.

    Raises:
        OptionError: naming the parameter, what was got and why it cannot be read.
    """
    try:
        re.compile(text)
    except re.error as error:
        raise OptionError(f"--{name.replace('_', '-')} {text} is no regular expression ({error})") from None


def duration(seconds: float) -> str:
    """Seconds as people say them: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"

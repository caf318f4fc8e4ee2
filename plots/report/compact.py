"""Make the page's own scripts small: without comments, indentation, and spaces beside punctuation."""

from __future__ import annotations

import re
from collections.abc import Iterator

# `+`, `-` and `/` keep their spaces: `a + +b` and `a++b` are two things, and a slash may begin a comment.
BESIDE = re.compile(r" *([,;{}()\[\]=<>?:&|*]) *")
BEFORE_LINE = re.compile(r"([,;{(\[])\n")  # nothing ends there


def compact(script: str) -> str:
    """A script that does the same with fewer characters; texts and templates stay as they are.

    For the scripts of this folder, whose comments stand on lines of their own, and whose regular expressions hold
    neither spaces nor quotes.
    """
    lines = (line.strip() for line in script.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith(("//", "/**", "*")))
    return "".join(
        part if verbatim else BEFORE_LINE.sub(r"\1", BESIDE.sub(r"\1", part)) for verbatim, part in _parts(kept)
    )


def _parts(script: str) -> Iterator[tuple[bool, str]]:
    """Code, and texts and templates, which are verbatim, in turn."""
    start = at = 0
    while at < len(script):
        if script[at] in "\"'`":
            end = _end_of_template(script, at) if script[at] == "`" else _end_of_text(script, at)
            yield False, script[start:at]
            yield True, script[at:end]
            start = at = end
        else:
            at += 1
    yield False, script[start:]


def _end_of_text(script: str, at: int) -> int:
    quote, at = script[at], at + 1
    while script[at] != quote:
        at += 2 if script[at] == "\\" else 1
    return at + 1


def _end_of_template(script: str, at: int) -> int:
    """Where a template ends; its expressions in `${}` may hold texts and templates."""
    at += 1
    while script[at] != "`":
        if script[at] == "\\":
            at += 2
        elif script.startswith("${", at):
            depth, at = 1, at + 2
            while depth:
                if script[at] in "\"'":
                    at = _end_of_text(script, at)
                elif script[at] == "`":
                    at = _end_of_template(script, at)
                else:
                    depth += {"{": 1, "}": -1}.get(script[at], 0)
                    at += 1
        else:
            at += 1
    return at + 1

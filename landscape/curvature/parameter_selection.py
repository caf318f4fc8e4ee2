"""Which parameters are meant: by a regular expression, or by the module they belong to."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def matching(parameters: Mapping[str, T], pattern: str) -> dict[str, T]:
    """Those whose name the expression finds, in order; all of them for an empty one.

    Raises:
        ValueError: it finds none, and names some that are near; or there are none at all.
    """
    found = {name: p for name, p in parameters.items() if re.search(pattern, name)}
    if not parameters:
        raise ValueError("the model has no trainable parameter, all are frozen; set requires_grad on some of them")
    if not found:
        names = list(parameters)
        near = difflib.get_close_matches(pattern, names, 5, cutoff=0.4) or names[:5]
        raise ValueError(f"--params {pattern} matches no trainable parameter; there are {', '.join(near)}, ...")
    return found


def by_module(parameters: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Parameters by the module that owns them, in order; those of the model itself under its own first name."""
    groups: dict[str, dict[str, T]] = {}
    for name, p in parameters.items():
        groups.setdefault(name.rpartition(".")[0] or name, {})[name] = p
    return groups

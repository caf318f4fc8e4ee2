"""Check tables of a study's file: their keys and types, the names in them, and where an error is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from landscape.options import did_you_mean

Table: TypeAlias = Mapping[str, Any]
KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "the file": {
        "title": str, "about": str, "data": str, "data_root": str, "measure_all": bool, "train": dict, "networks": dict,
        "measure": dict, "numbers": dict, "claims": list, "compare": list, "correlations": list, "load": dict,
        "figures": list, "diagrams": list,
    },
    "network": {
        "model": str, "args": dict, "files": (str, list), "load": dict, "relative": dict, "full_batch": dict,
        "over": dict,
        "group": str, "measure": bool, "seeds": (int, list), "recipe": str, "epochs": int, "fraction": (int, float),
        "given": bool,
    },
    "relative": {"epochs": (int, float), "fraction": (int, float)},
    "claim": {
        "name": str, "statement": str, "source": str, "number": str, "value": str, "sign": (str, int), "published": str,
    },
    "comparison": {"networks": list, "numbers": list}, "diagram": {"number": (str, list), "over": list},
    "correlation": {"x": str, "y": (str, list), "networks": list},
}  # fmt: skip


def tables(table: Table, key: str) -> Iterator[tuple[str, Table]]:
    """The tables below a key, by name."""
    for name, one in table.get(key, {}).items():
        refuse(not isinstance(one, Mapping), f"{key}.{name} must be a table, got {one!r}")
        yield name, one


def checked(table: Any, what: str, also: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """A table whose keys and types are those that it may have."""
    refuse(not isinstance(table, Mapping), f"{what} must be a table, got {table!r}")
    kinds = KEYS[what]
    for key, value in table.items():
        if key not in also or key in kinds:
            require_known(key, [*kinds, *sorted(also)], what)
            wrong = not isinstance(value, kinds[key]) or (isinstance(value, bool) and kinds[key] is not bool)
            refuse(wrong, f"{key} has another type than it should, got {value!r}")
    return dict(table)


def require_known(name: Any, names: Any, where: str) -> None:
    """Raise a ValueError with the nearest name unless there is one of that name."""
    near = did_you_mean(str(name), names)
    refuse(name not in names, f"{where}: there is no {name}; expected one of {', '.join(names)}{near}")


def refuse(wrong: bool, text: str) -> None:
    """Raise a ValueError where something is wrong."""
    if wrong:
        raise ValueError(text)


@contextmanager
def within(where: str) -> Iterator[None]:
    """Name the place in every error, which is one of the file and so no usage error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error

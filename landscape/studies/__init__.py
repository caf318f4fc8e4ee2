"""Studies: questions about several networks, from what is measured of them to the table and the verdict."""

from collections.abc import Mapping
from typing import Any


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changes, which count more, at every level of it."""
    both = {key: merged(table[key], value) for key, value in changes.items()
            if isinstance(value, Mapping) and isinstance(table.get(key), Mapping)}  # fmt: skip
    return {**table, **changes, **both}

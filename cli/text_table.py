"""Write tables as aligned text for the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from landscape.options import printable


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with common keys as aligned text under a header."""
    if not rows:
        return "(empty)"
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    """Four digits of a fraction, nothing for NaN."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return printable(value)

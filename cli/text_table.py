"""Write tables as aligned text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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


def flatness_table(out: Path, groups: Sequence[str]) -> str:
    """Every measure of stored results of `landscape flatness` with its error and invariances, definitions below."""
    from landscape.results import reader

    results = [reader.result(out, group) for group in groups]
    rows = [row for data in results for row in _measures(data, named=len(groups) > 1)]
    definitions = {
        name: words
        for data in results
        for name, words in zip(data["measure_name"].values.tolist(), data["definition"].values.tolist(), strict=True)
    }
    return "\n".join(
        [
            text_table(rows),
            "",
            "Rescaling, logit scale, permutation: is the value the same for the same function with other weights?",
            *(f"{name}: {definition}" for name, definition in definitions.items()),
        ]
    )


def _measures(data: Any, *, named: bool) -> Iterator[dict[str, Any]]:
    """A row per measure of one result."""
    names = {
        "measure": "measure_name", "value": "value", "error": "se", "units": "measure_units", "rho": "rho",
        "error over": "error_over", "rescaling": "invariant_rescaling", "logit scale": "invariant_logit_scale",
        "permutation": "invariant_permutation",
    }  # fmt: skip
    network = {"network": str(data.attrs["label"])} if named else {}
    for row in zip(*(data[stored].values.tolist() for stored in names.values()), strict=True):
        yield {**network, **dict(zip(names, row, strict=True))}

"""The table of `landscape flatness`: every measure with its error, definition and invariances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from landscape.cli.text_table import text_table


def flatness_table(out: Path, groups: Sequence[str]) -> str:
    """The table of stored results, and the definitions below it."""
    from landscape.results import reader

    results = [reader.result(out, group) for group in groups]
    rows = [row for data in results for row in _rows(data, named=len(groups) > 1)]
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


def _rows(data: Any, *, named: bool) -> Iterator[dict[str, Any]]:
    """A row per measure of one result."""
    names = {
        "measure": "measure_name", "value": "value", "error": "se", "units": "measure_units", "rho": "rho",
        "error over": "error_over", "rescaling": "invariant_rescaling", "logit scale": "invariant_logit_scale",
        "permutation": "invariant_permutation",
    }  # fmt: skip
    network = {"network": str(data.attrs["label"])} if named else {}
    for row in zip(*(data[stored].values.tolist() for stored in names.values()), strict=True):
        yield {**network, **dict(zip(names, row, strict=True))}

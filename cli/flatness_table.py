"""The table of `landscape flatness`: every measure with its error, definition and invariances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from landscape.cli.text_table import text_table


def flatness_table(out: Path, group: str) -> str:
    """The table of one stored result, and the definitions below it."""
    from landscape.results import reader

    data = reader.result(out, group)
    names = {
        "measure": "measure_name", "value": "value", "error": "se", "units": "measure_units", "rho": "rho",
        "error over": "error_over", "rescaling": "invariant_rescaling", "logit scale": "invariant_logit_scale",
        "permutation": "invariant_permutation",
    }  # fmt: skip
    columns = {name: data[stored].values.tolist() for name, stored in names.items()}
    rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    definitions = zip(columns["measure"], data["definition"].values.tolist(), strict=True)
    return "\n".join(
        [
            text_table(rows),
            "",
            "Rescaling, logit scale, permutation: is the value the same for the same function with other weights?",
            *(f"{name}: {definition}" for name, definition in definitions),
        ]
    )

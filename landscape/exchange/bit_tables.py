"""Tables of bit-widths from the results of `sensitivity`, for `landscape show --budget` and as JSON for quantisers."""

import json
import os
from pathlib import Path

from landscape.results import reader
from landscape.results.malformed import readable
from landscape.statistics.bit_allocation import BitTable, bit_table


def bit_tables(path: Path, budget: str, *, label: str | None = None) -> list[tuple[str, BitTable]]:
    """The table of every result of `sensitivity` in a file, (group, table).

    Raises:
        OptionError: the budget is no size, or too small.
        FileNotFoundError, ValueError: there is no results file, or nothing in it that a table can be made of.
    """
    found = [(name, data) for name, data in reader.find(path, "sensitivity", label) if reader.finished_units(data)]
    if not found:
        raise ValueError(f"{path} holds no result of sensitivity for --budget; measure one: landscape sensitivity")
    tables = []
    for name, data in found:
        with readable(path, name):
            tables.append((name, bit_table(data, budget)))
    return tables


def export_bit_tables(path: Path, out: Path, budget: str, *, label: str | None = None) -> list[Path]:
    """Write every table to `<label>-<digest>-bits.json`: bits of each unit, its parameters, and what is expected.

    Raises:
        OptionError, FileNotFoundError, ValueError: as `bit_tables`, or `out` is not a folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder; give another --out")
    tables = bit_tables(path, budget, label=label)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables:
        target = out / f"{name.partition('/')[2]}-bits.json"
        partial = target.with_name(f".{target.name}.partial")
        partial.unlink(missing_ok=True)  # perhaps a link
        partial.write_text(json.dumps(table.as_json(), indent=1) + "\n")
        os.replace(partial, target)
        written.append(target)
    return written

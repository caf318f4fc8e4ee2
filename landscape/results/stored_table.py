"""Store a table of words and numbers as a result of its own, which replaces an older one of the same definition."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from landscape.probe import Plan, Quantity
from landscape.results import group as groups
from landscape.results import handles, hdf5_file, replacing, updating
from landscape.results.run_key import RunKey, versions

Row = Mapping[str, Any]


def store(path: Path, name: str, label: str, definition: Mapping[str, Any], rows: Sequence[Row], about: Row) -> str:
    """Store rows with common columns, of words or of numbers (None: not known), as `NAME/<label>-<digest>`.

    Nothing is written where the file holds them already. Returns the name of the group.

    Raises:
        ValueError, PermissionError, OSError: the file cannot be changed.
    """
    path = replacing.behind_link(path)
    hdf5_file.check(path, writable=True)
    parameters = json.dumps(definition, sort_keys=True)
    content = json.dumps([parameters, list(map(dict, rows))], default=str)
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    words = {key: column for key, column in columns.items() if not _is_number(column)}
    plan = Plan(
        over={"row": np.arange(len(rows))},
        quantities={key: Quantity(key.replace("_", " ")) for key in columns if key not in words},
        labels={
            key: (
                Quantity(key.replace("_", " "), dims=("row",)),
                np.array(["" if v is None else str(v) for v in column]),
            )
            for key, column in words.items()
        },
    )
    attributes = {
        "parameters": parameters, "versions": json.dumps(versions()), "model": "", "data": "", "checkpoint_sha256": "",
        **about,
    }  # fmt: skip
    key = RunKey(name, label, digest, plan, attributes)

    def change(file: h5py.File) -> str:
        for old in handles.hard_links(file[name]) if name in file else ():
            if file[name][old].attrs.get("parameters") == parameters and not old.endswith(f"-{digest}"):
                del file[name][old]
        group = groups.open_or_create(file, key)
        for column in plan.quantities:
            group[column][...] = [np.nan if value is None else float(value) for value in columns[column]]
        group["done"][...] = 1
        groups.summarise(group, lambda probe, parameters: None)
        return str(group.name).strip("/")

    if there := groups.stored_group(path, name, digest):
        return there
    with updating.locked(path):
        return updating.update(path, change)


def rows_of(data: xr.Dataset) -> list[dict[str, Any]]:
    """The rows as they were stored; None where a number is not known, and for an empty word."""
    columns = {str(key): data[key].values.tolist() for key in data.data_vars if key != "done"}
    return [
        {key: None if value == "" or value != value else value for key, value in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]


def _is_number(column: Sequence[Any]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(isinstance(value, int | float) for value in known)

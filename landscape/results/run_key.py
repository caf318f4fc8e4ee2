"""Identify one result of a results file, and store its key in a journal, so that any process can merge it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from landscape.probe import Plan, Quantity, Values
from landscape.results.journal import Record

if TYPE_CHECKING:
    import xarray as xr

Arrays: TypeAlias = dict[str, np.ndarray]
Reduce: TypeAlias = Callable[[Arrays], Values]
ReduceOf: TypeAlias = Callable[[str, Mapping[str, Any]], Reduce | None]  # of a probe's name and parameters
LABEL = 400  # characters of a stored label


@dataclass(frozen=True)
class RunKey:
    """One result: runs with the same probe and digest continue it, any other digest gets a group of its own."""

    probe: str
    label: str  # readable, the attribute `label` and, made safe, part of the group's name; does not identify the result
    digest: str  # of everything that can change the numbers
    plan: Plan  # units, quantities, axes
    attributes: Mapping[str, Any] = field(default_factory=dict)  # stored with the group: parameters, versions, ...
    relabel: bool = False  # the user gave the label, which a result that is stored already takes too


@dataclass(frozen=True)
class Outcome:
    """Where a result lies and how much of it this run measured."""

    group: str
    units: int  # of the whole result
    measured: int  # units that this run measured; 0 if the result was complete before
    data: xr.Dataset | None = None  # the result itself, of a run without a file
    failed: str = ""  # the error of a probe that lost its units while others of the same pass went on


def versions() -> dict[str, str]:
    """Versions of everything that can change a number."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    libraries = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "h5py")}
    try:
        own = metadata.version("landscape-probes")
    except metadata.PackageNotFoundError:  # a checkout on the import path
        own = "not installed"
    return {"landscape": own, "python": platform.python_version(), **libraries}


def readable_label(label: str) -> str:
    """A label as it is stored: one line of printable text that HDF5 accepts."""
    return " ".join("".join(c if c.isprintable() else " " for c in label).split())[:LABEL] or "checkpoint"


def safe_label(label: str) -> str:
    """A label with the characters that a group's name allows."""
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in label).strip(".") or "checkpoint"


def fixed_width(values: np.ndarray) -> np.ndarray:
    """Text as fixed-width unicode (an object array has no bytes of its own), numbers as they are."""
    return np.asarray(values, dtype=np.str_) if np.asarray(values).dtype.kind in "OSU" else np.asarray(values)


def to_header(key: RunKey) -> Record:
    """The first record of a journal: enough to merge it without the process that wrote it."""
    plan = key.plan
    arrays: Arrays = {f"axis:{name}": values for name, values in {**plan.over, **plan.axes}.items()}
    arrays |= {f"label:{name}": fixed_width(values) for name, (_, values) in plan.labels.items()}
    tables = {"quantities": plan.quantities, "summaries": plan.summaries, "about": plan.about}
    data: dict[str, Any] = {table: {n: asdict(q) for n, q in rows.items()} for table, rows in tables.items()}
    data["labels"] = {name: asdict(quantity) for name, (quantity, _) in plan.labels.items()}
    data |= {"over": list(plan.over), "axes": list(plan.axes), "facts": dict(plan.facts), "grows": plan.grows}
    data |= {"probe": key.probe, "label": key.label, "digest": key.digest}
    return Record({"key": data, "attributes": dict(key.attributes)}, arrays)


def from_header(header: Record) -> RunKey:
    """The key of the result that a journal belongs to."""
    data = header.data["key"]

    def table(name: str) -> dict[str, Quantity]:
        return {row: Quantity(**{**q, "dims": tuple(q["dims"])}) for row, q in data[name].items()}

    plan = Plan(
        over={name: header.arrays[f"axis:{name}"] for name in data["over"]},
        quantities=table("quantities"),
        axes={name: header.arrays[f"axis:{name}"] for name in data["axes"]},
        labels={name: (quantity, header.arrays[f"label:{name}"]) for name, quantity in table("labels").items()},
        summaries=table("summaries"),
        about=table("about"),
        facts=data["facts"],
        grows=data.get("grows", False),
    )
    return RunKey(data["probe"], readable_label(data["label"]), data["digest"], plan, header.data["attributes"])

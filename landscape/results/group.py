"""One answer as a group of the results file: its layout, its journal header, and the merging of finished units.

A group is ready for any HDF5 reader from its first moment: every axis a named scale, every quantity there, NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.probe import Plan, Quantity, Values
from landscape.results.hdf5_file import check, own, reading
from landscape.results.journal import Record

Arrays = dict[str, np.ndarray]
Reduce = Callable[[Arrays], Values]
ReduceOf = Callable[[str, Mapping[str, Any]], Reduce | None]  # of a probe's name and parameters


@dataclass(frozen=True)
class Question:
    """What one group of the file answers; its digest decides what resumes and what gets a group of its own.

    Args:
        probe: name of the probe.
        label: readable part of the group's name; not part of the question.
        digest: of everything that can change the answer.
        plan: units, quantities, axes.
        attributes: stored with the group (parameters, spec, versions, ...).
    """

    probe: str
    label: str
    digest: str
    plan: Plan
    attributes: Mapping[str, Any] = field(default_factory=dict)


def header(question: Question) -> Record:
    """Enough to merge the journal without the process that wrote it."""
    plan = question.plan
    arrays: Arrays = {f"axis:{name}": values for name, values in {**plan.over, **plan.axes}.items()}
    arrays |= {f"label:{name}": _plain(values) for name, (_, values) in plan.labels.items()}
    groups = {"quantities": plan.quantities, "summaries": plan.summaries, "about": plan.about}
    data: dict[str, Any] = {key: {n: asdict(q) for n, q in table.items()} for key, table in groups.items()}
    data["labels"] = {name: asdict(quantity) for name, (quantity, _) in plan.labels.items()}
    data |= {"over": list(plan.over), "axes": list(plan.axes), "facts": dict(plan.facts)}
    data |= {"probe": question.probe, "label": question.label, "digest": question.digest}
    return Record({"question": data, "attributes": dict(question.attributes)}, arrays)


def question(header: Record) -> Question:
    """The question that a journal answers, from its header."""
    data = header.data["question"]

    def table(key: str) -> dict[str, Quantity]:
        return {name: Quantity(**{**q, "dims": tuple(q["dims"])}) for name, q in data[key].items()}

    plan = Plan(
        over={name: header.arrays[f"axis:{name}"] for name in data["over"]},
        quantities=table("quantities"),
        axes={name: header.arrays[f"axis:{name}"] for name in data["axes"]},
        labels={name: (q, header.arrays[f"label:{name}"]) for name, q in table("labels").items()},
        summaries=table("summaries"),
        about=table("about"),
        facts=data["facts"],
    )
    return Question(data["probe"], data["label"], data["digest"], plan, header.data["attributes"])


def names(file: h5py.File, probe: str, digest: str) -> list[str]:
    """Names of the groups that answer a question, whatever their label: one, or none."""
    return [f"{probe}/{name}" for name in file.get(probe, ()) if name.endswith(f"-{digest}")]


def opened(file: h5py.File, question: Question) -> h5py.Group:
    """The group of a question, made if absent."""
    existing = names(file, question.probe, question.digest)
    if not existing:
        return _create(file, question)
    group = file[existing[0]]
    for name in ("chosen_for", "choices"):  # an answer that a trial chooses later is found by it from then on
        if name in question.attributes:
            group.attrs[name] = question.attributes[name]
    _extend(group, question.plan)
    return group


def _extend(group: h5py.Group, plan: Plan) -> None:
    """Give a group of an earlier version the axes, labels and quantities that this version adds, NaN."""
    for name, values in plan.axes.items():
        if name not in group:
            _axis(group, name, values, plan)
    for name, (quantity, values) in plan.labels.items():
        if name not in group:
            _dataset(group, name, quantity, quantity.dims, plan, data=_plain(values))
    for name, quantity in plan.quantities.items():
        if name not in group:
            _dataset(group, name, quantity, tuple(plan.over) + quantity.dims, plan)
    for name, quantity in plan.summaries.items():
        if name not in group:
            _dataset(group, name, quantity, quantity.dims, plan)


def _axis(group: h5py.Group, name: str, values: np.ndarray, plan: Plan) -> None:
    axis = group.create_dataset(name, data=values)
    axis.make_scale(name)
    _describe(axis, plan.about.get(name, Quantity(name)))


def _create(file: h5py.File, question: Question) -> h5py.Group:
    plan = question.plan
    group = file.create_group(f"{question.probe}/{question.label}-{question.digest}")
    for name, value in {**question.attributes, **plan.facts}.items():
        group.attrs[name] = value
    group.attrs["probe"], group.attrs["label"] = question.probe, question.label
    group.attrs["created"], group.attrs["finished"] = _now(), ""
    for name, values in plan.over.items():
        _axis(group, name, values, plan)
    _extend(group, plan)
    units = tuple(plan.over)
    done = Quantity("1 where the unit is finished", dtype="uint8")
    _dataset(group, "done", done, units, plan, data=np.zeros(plan.shape, np.uint8))
    return group


def _dataset(
    group: h5py.Group,
    name: str,
    quantity: Quantity,
    dims: tuple[str, ...],
    plan: Plan,
    *,
    data: np.ndarray | None = None,
) -> None:
    shape = tuple(len(plan.axis(dim)) for dim in dims)
    if data is None:
        data = np.full(shape, np.nan if np.dtype(quantity.dtype).kind == "f" else 0, quantity.dtype)
    if data.dtype.kind == "U":
        dataset = group.create_dataset(name, data=data.astype(object), dtype=h5py.string_dtype())
    else:
        dataset = group.create_dataset(name, data=data)
    _describe(dataset, quantity)
    for axis, dim in enumerate(dims):
        dataset.dims[axis].attach_scale(group[dim])


def _describe(dataset: h5py.Dataset, quantity: Quantity) -> None:
    dataset.attrs["long_name"], dataset.attrs["units"] = quantity.long_name, quantity.units


def merge(group: h5py.Group, records: Iterator[Record], reduce_of: ReduceOf) -> None:
    """Store the units of a journal, then the summaries of all that is finished."""
    fresh = [record for record in records if "index" in record.data]
    if not fresh:
        return
    stored = {name: group[name][()] for name in [*fresh[0].arrays, "done"]}
    for record in fresh:
        index = tuple(record.data["index"])
        for name, value in record.arrays.items():
            stored[name][index] = value
        stored["done"][index] = 1
    for name, values in stored.items():
        group[name][...] = values
    reduce = reduce_of(group.attrs["probe"], json.loads(group.attrs.get("parameters", "{}")))
    if reduce is not None:
        for name, value in reduce(arrays(group)).items():
            if name in group:  # one that was imported, or made by an earlier version, has the summaries of its plan
                group[name][...] = value
    if stored["done"].all():
        group.attrs["finished"] = _now()


def arrays(group: h5py.Group) -> Arrays:
    """All arrays of a group, by name; text as Python strings."""
    return {name: _decoded(group[name]) for name in own(group)}


def _decoded(dataset: h5py.Dataset) -> np.ndarray:
    text = h5py.check_string_dtype(dataset.dtype)
    return np.asarray(dataset.asstr()[()] if text else dataset[()])


def _plain(values: np.ndarray) -> np.ndarray:
    """Text as fixed-width unicode: an object array has no bytes of its own."""
    return np.asarray(values, dtype=np.str_) if np.asarray(values).dtype.kind in "OSU" else np.asarray(values)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def stored(path: Path, probe: str, digest: str) -> str | None:
    """Name of the group that already holds (part of) the answer, whatever its label."""
    if not path.exists():
        return None
    check(path)
    with reading(path) as file:
        return next(iter(names(file, probe, digest)), None)


def chosen(path: Path, probe: str, undecided: str) -> str | None:
    """Name of the group in which an earlier run recorded what it chose for a question that leaves a choice."""
    if not path.exists():
        return None
    check(path)
    with reading(path) as file:
        groups = file.get(probe, {})
        found = (name for name in groups if groups[name].attrs.get("chosen_for") == undecided)
        return next((f"{probe}/{name}" for name in found), None)


def read_group(path: Path, group: str) -> Arrays:
    """All arrays of one group, by name."""
    with reading(path) as file:
        return arrays(file[group])


def attribute(path: Path, group: str, name: str) -> Any:
    """One attribute of a stored group."""
    with reading(path) as file:
        return file[group].attrs[name]


@dataclass(frozen=True)
class Outcome:
    """Where the answer lies and how much of it this run measured.

    Args:
        group: of the results file.
        units: in the whole question.
        measured: by this run; 0 when the question had been answered before.
    """

    group: str
    units: int
    measured: int


def safe(label: str) -> str:
    """A label as it may stand in a group's name."""
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in label).strip(".") or "checkpoint"

"""Create a result as its plan declares it, in a file or in memory: every axis in place, unfinished values NaN."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import h5py
import numpy as np

from landscape.probe import AXES, Plan, Quantity
from landscape.results.handles import MemoryHandle, ObjectID, opened, python_value
from landscape.results.run_key import Arrays, RunKey, fixed_width, safe_label
from landscape.statistics.stored import store_reasons

GROWTH = 128  # rows by which the datasets of a series grow on the disk
# HDF5's low-level interface takes three quarters of the time of h5py's objects.
_TEXT, _NUMBER, _COUNT = (h5py.h5t.py_create(np.dtype(kind)) for kind in (h5py.string_dtype(), float, "i8"))
_STORED_TEXT, _SCALAR = h5py.h5t.py_create(h5py.string_dtype(), logical=True), h5py.h5s.create(h5py.h5s.SCALAR)
_UNTIMED = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
_UNTIMED.set_obj_track_times(False)  # equal results are equal bytes
OVER, N = "over", "n"  # attributes of a standard error: what its independent values are, and how many


@dataclass(frozen=True)
class InMemory:
    """A result that is in no file, with attributes and arrays as they would be read from one."""

    name: str
    attrs: dict[str, Any]
    arrays: dict[str, MemoryHandle]  # in the order of a file, by name


def in_file(file: h5py.File, key: RunKey) -> h5py.Group:
    """The group of a new result."""
    group = file.create_group(name_of(key))
    _describe(group.id, _attributes(key))
    for name, quantity, dims, values in _arrays(key.plan):
        form = _extensible(key.plan, dims, values.shape)
        item = group.create_dataset(name, data=values, **form).id if form else _stored(group.id, name, values)
        if dims == (name,):
            h5py.h5ds.set_scale(item, name.encode())
        _describe(item, _description(quantity))
        for axis, dim in enumerate(dims if dims != (name,) else ()):
            h5py.h5ds.attach_scale(item, opened(group.id, dim), axis)
    return group


def in_memory(key: RunKey) -> InMemory:
    """A new result without a file."""
    arrays = {
        name: MemoryHandle(values, None if dims == (name,) else dims, _description(quantity))
        for name, quantity, dims, values in _arrays(key.plan)
    }
    attributes = {name: python_value(value) for name, value in _attributes(key).items()}
    return InMemory(name_of(key), attributes, dict(sorted(arrays.items())))


def empty_arrays(plan: Plan) -> Arrays:
    """The arrays of a new result, by name."""
    return {name: values for name, _, _, values in _arrays(plan)}


def name_of(key: RunKey) -> str:
    """The name of the group of a result."""
    return f"{key.probe}/{safe_label(key.label)}-{key.digest}"


def now() -> str:
    """The time as results store it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _describe(item: ObjectID, about: Mapping[str, Any]) -> None:
    """Give an object attributes that it does not have yet."""
    for name, value in about.items():
        if not isinstance(value, str | float | int) or isinstance(value, bool):
            (h5py.Group if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset)(item).attrs[name] = value
            continue
        text, form = isinstance(value, str), _NUMBER if isinstance(value, float) else _COUNT
        made = h5py.h5a.create(item, name.encode(), _STORED_TEXT if text else form, _SCALAR)
        made.write(np.array(value, object if text else form.dtype), mtype=_TEXT if text else form)


def _stored(group: h5py.h5g.GroupID, name: str, values: np.ndarray) -> h5py.h5d.DatasetID:
    """A new array of numbers or of texts."""
    text = values.dtype.kind == "U"
    form = _STORED_TEXT if text else h5py.h5t.py_create(values.dtype, logical=True)
    item = h5py.h5d.create(group, name.encode(), form, h5py.h5s.create_simple(values.shape), _UNTIMED)
    if values.size:
        whole = np.asarray(values, object if text else None, order="C")
        item.write(h5py.h5s.ALL, h5py.h5s.ALL, whole, mtype=_TEXT if text else None)
    return item


def _attributes(key: RunKey) -> dict[str, Any]:
    reasons: dict[str, Any] = {}
    store_reasons(reasons, key.plan.facts)
    own = {"probe": key.probe, "label": key.label, "digest": key.digest, "created": now(), "finished": ""}
    return {**reasons, **key.attributes, **key.plan.facts, **own}


def _arrays(plan: Plan) -> Iterator[tuple[str, Quantity, tuple[str, ...], np.ndarray]]:
    """Name, meaning, axes and first values of every array; an axis, which comes before others, has itself as axis."""
    for name, values in {**plan.over, **plan.axes}.items():
        yield name, plan.about.get(name, Quantity(AXES.get(name, name))), (name,), np.asarray(values)
    for name, (quantity, values) in plan.labels.items():
        yield name, quantity, quantity.dims, fixed_width(values)
    over = tuple(plan.over)
    done = Quantity("1 where the unit is finished", dtype="uint8")
    empty = {name: (quantity, over + quantity.dims) for name, quantity in plan.quantities.items()}
    empty |= {name: (quantity, quantity.dims) for name, quantity in plan.summaries.items()}
    for name, (quantity, dims) in {**empty, "done": (done, over)}.items():
        fill = np.nan if np.dtype(quantity.dtype).kind == "f" else 0
        yield name, quantity, dims, np.full([len(plan.axis(dim)) for dim in dims], fill, quantity.dtype)


def _extensible(plan: Plan, dims: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, Any]:
    """The form of a dataset whose first axis is that of a growing plan; nothing for all others."""
    if not plan.grows or dims[:1] != tuple(plan.over):
        return {}
    return {"maxshape": (None, *shape[1:]), "chunks": (GROWTH, *shape[1:])}


def _description(quantity: Quantity) -> dict[str, str | float]:
    """The attributes of an array."""
    over: dict[str, str | float] = {OVER: quantity.over, N: np.nan} if quantity.over else {}
    bounds = {"bounds": quantity.bounds} if quantity.bounds else {}
    return {"long_name": quantity.long_name, "units": quantity.units, **over, **bounds}

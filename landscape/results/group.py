"""Store one result as an HDF5 group: created with every axis in place, found by its digest, filled unit by unit.

A group opens in any HDF5 reader from its first moment: every axis is a named scale, unfinished values are NaN.
"""

import contextlib
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import h5py
import numpy as np

from landscape.probe import MICRO_BATCHES, Values
from landscape.results import creation
from landscape.results.creation import OVER, InMemory, N, now
from landscape.results.handles import (
    CONVENTION,
    Handle,
    OnDemand,
    array_of,
    attributes_of,
    hard_links,
    links,
    opened,
    places,
)  # fmt: skip
from landscape.results.hdf5_file import CHECK, check, reading
from landscape.results.journal import Record
from landscape.results.run_key import Arrays, ReduceOf, RunKey
from landscape.statistics.stored import independent, smallest, store_reasons

SCALE = {"CLASS", "NAME"}  # attributes: that an array is a scale
AUTOTUNED = ("chosen_for", "choices")  # attributes: the digest before autotuning, and what autotuning chose

Handles = Mapping[str, Handle]
Group: TypeAlias = h5py.Group | InMemory
_log = logging.getLogger(__name__)


def name_with_digest(file: h5py.File, probe: str, digest: str) -> str | None:
    """Name of the group of a result, whatever its label; None where there is none."""
    return next((f"{probe}/{name}" for name in file.get(probe, ()) if name.endswith(f"-{digest}")), None)


def open_or_create(file: h5py.File, key: RunKey) -> h5py.Group:
    """The group of a result, created if absent. Raises ValueError: it lacks an array."""
    existing = name_with_digest(file, key.probe, key.digest)
    if existing is None:
        if other := _other_checkpoint(file, key):
            _log.info(
                "note: %s is another checkpoint with the label %s; --label NAME gives it another", other, key.label
            )
        return creation.in_file(file, key)
    group, plan = file[existing], key.plan
    held = (*plan.over, *plan.axes, *plan.labels, *plan.quantities, *plan.summaries, "done")
    if lacking := ", ".join(name for name in held if name not in group):
        raise ValueError(
            f"{existing} is not as landscape writes it (it lacks {lacking}); give --overwrite to measure it again, or "
            "another --out"
        )
    if key.relabel and group.attrs.get("label") != key.label:
        _log.info("%s has the label %s now, it was %s", existing, key.label, group.attrs.get("label"))
        group.attrs["label"] = key.label
    for name in AUTOTUNED:  # a result measured with explicit options is found by autotuning from now on
        if name in key.attributes:
            group.attrs[name] = key.attributes[name]
            seal(group)
    return group


def merge(group: Group, records: Iterable[Record], reduce_of: ReduceOf, *, known: Arrays | None = None) -> int:
    """Store the units of a journal, then recompute the summaries from everything finished.

    Finished units among the `known` arrays that the group does not hold any more are stored again; returns how many.
    """
    items = handles(group)
    fresh = [record for record in records if "index" in record.data]
    stored = {"done": items["done"].array()}
    lost = np.zeros_like(stored["done"], bool) if known is None else (known["done"] == 1) & (stored["done"] != 1)
    if not fresh and not lost.any():
        if CHECK not in group.attrs:  # it is new
            seal(group, items)
        return 0
    names = fresh[0].arrays if fresh else known or {}
    parts = max((int(record.data.get(MICRO_BATCHES, 1)) for record in fresh), default=1)
    stored |= {name: items[name].array() for name in names}
    if known is not None and lost.any():
        for name in stored:
            stored[name][lost] = known[name][lost]
    for record in fresh:
        index = tuple(record.data["index"])
        if stored["done"][index] != 1:  # what is finished stays as it is
            for name, value in record.arrays.items():
                stored[name][index] = value
            stored["done"][index] = 1
    for name, values in stored.items():
        items[name].write(values)
    note_micro_batches(group, parts)
    summarise(group, reduce_of, items)
    return int(lost.sum())


def note_micro_batches(group: Group, count: int) -> int:
    """Note into how many parts mini-batches were divided for lack of memory; returns the most that is known."""
    known = int(group.attrs.get(MICRO_BATCHES, 1))
    if count > known:
        group.attrs[MICRO_BATCHES] = count
        seal(group)
    return max(count, known)


def summarise(group: Group, reduce_of: ReduceOf, items: Handles | None = None) -> None:
    """Compute the summaries from everything finished, and note when the last unit was."""
    reduce = reduce_of(group.attrs["probe"], json.loads(group.attrs.get("parameters", "{}")))
    stored = items or handles(group)
    values = {} if reduce is None else reduce({name: item.array() for name, item in stored.items()})
    for name, value in values.items():
        if name in stored:  # an imported surface has fewer summaries than a measured one
            stored[name].write(value)
    finished = bool(stored["done"].array().all())
    store_reasons(group.attrs, values if finished else {})
    note_counts(group, values, stored)
    (mark_finished if finished else seal)(group, stored)


def seal(group: Group, stored: Handles | None = None) -> None:
    """Store the checksum, after every change; `stored`: its arrays, where they are open already."""
    group.attrs[CHECK] = checksum(group, stored)


def checksum(group: Group, arrays: Handles | None = None, attributes: Mapping[str, Any] | None = None) -> int:
    """A checksum of all arrays and attributes; of the label, which anybody may change, and of times the names alone.

    `arrays` and `attributes`: its own, where they are known already.
    """
    stored = attributes_in(group) if attributes is None else attributes
    about = {name: "" if name in ("label", "created", "finished") else value for name, value in stored.items()}
    found = zlib.crc32(repr(sorted((about | {CHECK: 0}).items())).encode())
    for name, item in sorted((arrays or handles(group)).items()):
        found = zlib.crc32(repr((name, sorted(item.attributes().items()))).encode(), found)
        found = zlib.crc32(item.content(), found)
    return found


def note_counts(group: Group, values: Values = MappingProxyType({}), arrays: Handles | None = None) -> None:
    """Note beside every standard error how many independent values it is of, by `values` or the finished units."""
    where, items = places_in(group), arrays or handles(group)
    errors = {name: str(item.attributes()[OVER]) for name, item in items.items() if OVER in item.attributes()}
    stored = {name: items[name].array() for name in {"done", *errors.values()} & set(items)}
    axes = {name: items[name].dims(name, where) for name in (*errors, *stored)}
    for name, over in errors.items():
        n = values.get(f"{name}.{N}")
        if n is None:
            n = independent(over, axes[name], stored, axes, fact=group.attrs.get(over))
        items[name].modify(N, smallest(n))


def mark_finished(group: Group, stored: Handles | None = None) -> None:
    """Note that a result is finished, and when."""
    group.attrs["finished"] = now()
    seal(group, stored)


def arrays(group: h5py.Group) -> Arrays:
    """All arrays of a group, by name; text as Python strings."""
    return {name: item.array() for name, item in handles(group).items()}


def handles(group: Group) -> Mapping[str, Handle]:
    """The open arrays of a group, by name."""
    if isinstance(group, InMemory):
        return group.arrays
    return {name: Handle(item) for name, item in datasets(group).items()}


def attributes_in(group: Group) -> Mapping[str, Any]:
    """The attributes of a group by name, as Python has them."""
    return dict(sorted(group.attrs.items())) if isinstance(group, InMemory) else attributes_of(group.id)


def places_in(group: Group) -> Mapping[int, str]:
    """Where the arrays of a group lie in the file, see `places`."""
    return {} if isinstance(group, InMemory) else places(group.id)


def results_in(file: h5py.File) -> Iterator[tuple[str, h5py.Group]]:
    """`<probe>/<label>-<digest>` groups, by hard links alone."""
    for probe in hard_links(file):
        if isinstance(results := file[probe], h5py.Group):
            for name in hard_links(results):
                group = results[name]
                if isinstance(group, h5py.Group) and "probe" in group.attrs:
                    yield f"{probe}/{name}", group


def datasets(group: h5py.Group) -> dict[str, h5py.h5d.DatasetID]:
    """The arrays of a group by name, by hard links alone, without h5py's objects, which take most of the time."""
    items = ((name, opened(group.id, name)) for name in places(group.id).values())
    return {name: item for name, item in items if isinstance(item, h5py.h5d.DatasetID)}


def copy(source: h5py.Group, file: h5py.File, name: str, arrays: Handles | None = None) -> h5py.Group:
    """Copy a result into another file as it is: datasets, attributes and scales, without links to elsewhere.

    HDF5 copies no reference between scales and the arrays whose axes they are, which are attached again; `arrays`: its
    own, where they are known already.
    """
    created = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    created.set_create_intermediate_group(True)
    flat = h5py.h5p.create(h5py.h5p.OBJECT_COPY)
    flat.set_copy_object(h5py.h5o.COPY_SHALLOW_HIERARCHY_FLAG)
    h5py.h5o.copy(source.id, b".", file.id, name.encode(), flat, created)
    group, where, arrays = file[name], places(source.id), arrays or handles(source)
    made = OnDemand(arrays, lambda key: opened(group.id, key))  # many are no axis and have none
    for key in {key for key, _, _ in links(group.id)} - set(arrays):
        del group[key]
    for key, array in arrays.items():
        for attribute in (CONVENTION - SCALE).intersection(array.attribute_names):
            h5py.h5a.delete(made[key], attribute.encode())
    for key, array in arrays.items():
        for axis, names in enumerate(array.scales(where) or ()):
            for scale in names:
                h5py.h5ds.attach_scale(made[key], made[scale], axis)
    return group


def stored_group(path: Path, probe: str, digest: str, *, autotuned: bool = False) -> str | None:
    """Name of the group that already holds (part of) a result, whatever its label.

    With `autotuned`, the group in which an earlier run stored its choices, found by the digest before autotuning.
    """
    if not path.exists():
        return None
    check(path)
    with reading(path) as file:
        if not autotuned:
            return name_with_digest(file, probe, digest)
        choices = {name: group.attrs.get("chosen_for") for name, group in file.get(probe, {}).items()}
        return next((f"{probe}/{name}" for name, chosen_for in choices.items() if chosen_for == digest), None)


@contextlib.contextmanager
def _reading_group(path: Path, name: str) -> Iterator[h5py.Group]:
    with reading(path) as file:
        if name not in file:
            raise ValueError(f"{path} does not hold {name} any more; another program replaced it, run again")
        yield file[name]


def read_group(path: Path, group: str) -> Arrays:
    """All arrays of one group, by name."""
    with _reading_group(path, group) as stored:
        return arrays(stored)


def read_array(path: Path, group: str, name: str) -> np.ndarray:
    """One array of a stored group."""
    with _reading_group(path, group) as stored:
        return array_of(stored[name])


def attribute(path: Path, group: str, name: str) -> Any:
    """One attribute of a stored group."""
    with _reading_group(path, group) as stored:
        return stored.attrs[name]


def attributes(path: Path, group: str) -> dict[str, Any]:
    """All attributes of a stored group."""
    with _reading_group(path, group) as stored:
        return dict(stored.attrs)


def _other_checkpoint(file: h5py.File, key: RunKey) -> str:
    """The group of another checkpoint with the same label, which tables could not tell apart; "" if none."""
    own = key.attributes.get("checkpoint_sha256")
    for name, group in results_in(file) if own else ():
        if group.attrs.get("label") == key.label and group.attrs.get("checkpoint_sha256", "") not in ("", own):
            return name
    return ""

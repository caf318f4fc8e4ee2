"""Read the objects of an HDF5 file by h5py's low-level interface, in a quarter of the time that its objects take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import h5py
import numpy as np

from landscape.options import printable

ObjectID: TypeAlias = h5py.h5g.GroupID | h5py.h5d.DatasetID
Guard: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]  # surrounds what is read

# Attributes that the HDF5 dimension-scale convention and netCDF-4 add to a dataset's own.
CONVENTION = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS"} | {
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCProperties"
}  # fmt: skip

# Types that are read as they are, without asking HDF5 every time how it calls them.
_IN_MEMORY = {np.dtype(name): h5py.h5t.py_create(np.dtype(name)) for name in ("f8", "f4", "i8", "i4", "u1")}
_TEXT, _REFERENCES = (h5py.h5t.py_create(t) for t in (h5py.string_dtype(), h5py.vlen_dtype(h5py.ref_dtype)))
_FORMS: Mapping[int, Sequence[tuple[np.dtype, h5py.h5t.TypeID]]] = {  # of attributes, by their bytes
    16: [(np.dtype(object), _TEXT)],
    8: [(kind, _IN_MEMORY[kind]) for kind in (np.dtype("f8"), np.dtype("i8"))],
}

LIST = b"DIMENSION_LIST"  # attribute: the scales of each axis of a dataset
ENTRY = 16  # bytes of an axis in that attribute, or of a text in any
MOST_SCALES = 8  # of one axis, which has one


class Handle:
    """An array, of which shape and type are asked for when they are needed: each takes as long as the opening."""

    def __init__(self, item: h5py.h5d.DatasetID) -> None:
        self.id = item

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """Lengths of the axes; None where there is no number at all."""
        shape: tuple[int, ...] | None = self.id.shape
        return shape

    @cached_property
    def dtype(self) -> np.dtype:
        """The type of its numbers or texts."""
        dtype: np.dtype = self.id.dtype
        return dtype

    def array(self) -> np.ndarray:
        """The whole of it; text as Python strings."""
        text = self.dtype.hasobject and h5py.check_string_dtype(self.dtype) is not None
        if self.shape is None or not (text or self.dtype in _IN_MEMORY):
            return array_of(h5py.Dataset(self.id))
        found = np.empty(self.shape, self.dtype)
        if found.size:
            self.id.read(h5py.h5s.ALL, h5py.h5s.ALL, found, mtype=_TEXT if text else _IN_MEMORY[self.dtype])
        return _printable(found) if text else found


def hard_links(group: h5py.Group) -> list[str]:
    """Names in a group that are hard links, not soft or external ones."""
    links = group.id.links
    return [group._d(name) for name in group.id if links.get_info(name).type == h5py.h5l.TYPE_HARD]


def array_of(dataset: h5py.Dataset) -> np.ndarray:
    """The whole of a dataset; text as Python strings."""
    if h5py.check_string_dtype(dataset.dtype):
        return _printable(np.asarray(dataset[()], dtype=object))
    return np.asarray(dataset[()])


def _printable(texts: np.ndarray) -> np.ndarray:
    return np.array([printable(text.decode()) for text in texts.ravel()], object).reshape(texts.shape)


class Attributes(Mapping[str, Any]):
    """The attributes of a group or an array that are its own, each of which is read when it is asked for."""

    def __init__(
        self, item: ObjectID, guard: Guard = contextlib.nullcontext, check: Callable[[str, Any], None] | None = None
    ) -> None:
        self._item, self._guard, self._check, self._known = item, guard, check, dict[str, Any]()
        named = list[tuple[bytes, int]]()  # decoded afterwards: HDF5 loses an error that is raised while it iterates
        h5py.h5a.iterate(item, lambda name, info: named.append((name, info.data_size)), info=True)
        with guard():
            self._sizes = {text: size for name, size in named if (text := name.decode()) not in CONVENTION}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            size = self._sizes[name]
            with self._guard():
                value = _value(self._item, name.encode(), size)
                if self._check is not None:
                    self._check(name, value)
            self._known[name] = value
        return self._known[name]


def attributes_of(item: ObjectID) -> dict[str, Any]:
    """Own attributes, with values as Python has them; None of several texts."""
    return dict(Attributes(item))


def _value(item: ObjectID, name: bytes, size: int) -> Any:
    attribute = h5py.h5a.open(item, name)
    for expected, form in _FORMS.get(size, ()):
        if size == ENTRY or attribute.get_type().equal(form):
            value = np.empty((), expected)
            with contextlib.suppress(OSError, TypeError, ValueError):  # it is something else, or several
                attribute.read(value, mtype=form)
                return _python_value(value[()])
    dtype, single = attribute.dtype, attribute.shape == ()
    if not single and dtype.hasobject:  # many texts, which may all be one in the file
        return None
    if not single or not (dtype.kind in "biuf" or h5py.check_string_dtype(dtype)):
        return _python_value((h5py.Group if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset)(item).attrs[name])
    value = np.empty((), dtype)
    attribute.read(value)
    return _python_value(value[()])


def _python_value(value: Any) -> Any:
    if isinstance(value, bytes | str):
        return printable(value.decode() if isinstance(value, bytes) else value)
    return value.item() if isinstance(value, np.generic) else value


def scales_of(dataset: h5py.h5d.DatasetID, places: Mapping[int, str]) -> list[list[str]]:
    """Names of the scales of every axis that lie in the dataset's own group; empty for a scale."""
    if h5py.h5ds.is_scale(dataset):
        return []
    if not h5py.h5a.exists(dataset, LIST):
        return [[] for _ in dataset.shape]
    attached = h5py.h5a.open(dataset, LIST)
    axes = np.empty(attached.get_storage_size() // ENTRY, object)
    attached.read(axes, mtype=_REFERENCES)
    found = [
        [places.get(h5py.h5o.get_info(h5py.h5r.dereference(scale, dataset)).addr) for scale in axis[:MOST_SCALES]]
        for axis in axes
    ]
    return [[name for name in names if name] for names in found]

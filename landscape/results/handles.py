"""Read the objects of an HDF5 file by h5py's low-level interface, in a quarter of the time that its objects take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, TypeVar

import h5py
import numpy as np

from landscape.options import printable
from landscape.results.object_headers import LEFT, Header

ObjectID: TypeAlias = h5py.h5g.GroupID | h5py.h5d.DatasetID
T = TypeVar("T")
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

TEXT_TYPE = np.dtype(h5py.string_dtype())
LIST = b"DIMENSION_LIST"  # attribute: the scales of each axis of a dataset
ENTRY = 16  # bytes of an axis in that attribute, or of a text in any
MOST_SCALES = 8  # of one axis, which has one
_SHORT = 256  # bytes of a text that is likely one of many


class Handle:
    """An array, of which shape and type are asked for when they are needed: each takes as long as the opening."""

    def __init__(self, item: h5py.h5d.DatasetID | Callable[[], Any], header: Header | None = None) -> None:
        self._item, self.header = item, header  # with its header, it is opened where that does not suffice
        self._attributes: Mapping[str, Any] | None = None
        if header is not None and header.dtype is not None:
            self.shape, self.dtype = header.shape, TEXT_TYPE if header.dtype.hasobject else header.dtype

    @cached_property
    def id(self) -> h5py.h5d.DatasetID:
        """The open array."""
        return self._item() if callable(self._item) else self._item

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

    def attributes(self, guard: Guard = contextlib.nullcontext) -> Mapping[str, Any]:
        """Its attributes, each of which is read once."""
        if self._attributes is None and self.header is not None:
            with contextlib.suppress(*LEFT):
                self._attributes = {
                    name: python_value(self.header.value(name))
                    for name in sorted(self.header.attributes)
                    if name not in CONVENTION
                }
        if self._attributes is None:
            self._attributes = attributes_of(lambda: self.id, guard, header=self.header)
        return self._attributes

    @property
    def attribute_names(self) -> Iterable[str]:
        """Names of its attributes, with those of the conventions."""
        if self.header is not None:
            return self.header.attributes
        names = list[bytes]()  # decoded afterwards, as `links`
        h5py.h5a.iterate(self.id, names.append)
        return [name.decode() for name in names]

    @property
    def attributes_stored(self) -> int:
        """How many attributes there are, with those of the conventions."""
        return len(self.header.attributes) if self.header else h5py.h5a.get_num_attrs(self.id)

    @property
    def end(self) -> int:
        """Where its numbers end in the file; 0 where they lie in several pieces."""
        if self.header is not None:
            return self.header.offset + self.header.size
        offset = self.id.get_offset()
        return 0 if offset is None else offset + int(self.id.get_storage_size())

    def stored_size(self, attribute: bytes) -> int | None:
        """Bytes of an attribute in the file; None where there is none."""
        if self.header is not None:
            found = self.header.attributes.get(attribute.decode())
            return None if found is None else found.size
        there = h5py.h5a.exists(self.id, attribute)
        return h5py.h5a.get_info(self.id, attribute).data_size if there else None

    def scales(self, places: Mapping[int, str]) -> list[list[str]] | None:
        """Names of the scales of every axis, as `scales_of`; None of a scale."""
        if self.header is None:
            return None if h5py.h5ds.is_scale(self.id) else scales_of(self.id, places)
        if self.header.is_scale:
            return None
        try:
            found = self.header.scales(MOST_SCALES)
        except LEFT:
            return scales_of(self.id, places)
        return [[name for at in axis if (name := places.get(at))] for axis in found]

    def dims(self, own: str, places: Mapping[int, str]) -> tuple[str, ...]:
        """Names of the axes by their scales; an axis without one (in a foreign file) is named after its array."""
        scales = self.scales(places)
        return (own,) if scales is None else named(scales, own)

    def content(self) -> Any:
        """The bytes of its numbers, or of all its texts in one."""
        if self.header is not None and self.header.dtype is not None and not self.header.dtype.hasobject:
            return self.header.content
        values = self.array()
        return "\0".join(values.ravel()).encode() if values.dtype.hasobject else np.ascontiguousarray(values).data

    def array(self) -> np.ndarray:
        if self.header is not None:
            with contextlib.suppress(*LEFT):
                values = self.header.array()
                return _printable(values) if values.dtype.hasobject else values
        text = self.dtype.hasobject and h5py.check_string_dtype(self.dtype) is not None
        if self.shape is None or not (text or self.dtype in _IN_MEMORY):
            return array_of(h5py.Dataset(self.id))
        found = np.empty(self.shape, self.dtype)
        if found.size:
            self.id.read(h5py.h5s.ALL, h5py.h5s.ALL, found, mtype=_TEXT if text else _IN_MEMORY[self.dtype])
        return _printable(found) if text else found

    def write(self, values: Any) -> None:
        if self.shape is None or self.dtype not in _IN_MEMORY:
            h5py.Dataset(self.id)[...] = values
        elif 0 not in self.shape:
            whole = np.array(np.broadcast_to(values, self.shape), self.dtype, order="C")
            self.id.write(h5py.h5s.ALL, h5py.h5s.ALL, whole, mtype=_IN_MEMORY[self.dtype])

    def modify(self, attribute: str, value: float) -> None:
        h5py.h5a.open(self.id, attribute.encode()).write(np.array(value, float), mtype=_IN_MEMORY[np.dtype("f8")])
        if isinstance(known := self.attributes(), OnDemand):  # which an open array has
            known.known[attribute] = float(value)


class MemoryHandle(Handle):
    """An array that is in no file; `dims` names its axes, None where it is one itself."""

    def __init__(self, values: np.ndarray, dims: Sequence[str] | None, attributes: Mapping[str, Any]) -> None:
        super().__init__(lambda: None)
        text = values.dtype.kind == "U"
        self._values, self._dims = _printable(values) if text else values.copy(), dims
        self.shape, self.dtype = values.shape, TEXT_TYPE if text else values.dtype
        self._known = {name: python_value(value) for name, value in sorted(attributes.items())}

    def attributes(self, guard: Guard = contextlib.nullcontext) -> Mapping[str, Any]:
        return self._known

    def scales(self, places: Mapping[int, str]) -> list[list[str]] | None:
        return None if self._dims is None else [[name] for name in self._dims]

    def array(self) -> np.ndarray:
        return self._values.copy()

    def write(self, values: Any) -> None:
        self._values[...] = values

    def modify(self, attribute: str, value: float) -> None:
        self._known[attribute] = float(value)


def links(group: h5py.h5g.GroupID) -> list[tuple[str, int, int]]:
    """The links of a group: name, kind, and where in the file the object lies; bytes that are no text are kept.

    They are decoded after the iteration, in which HDF5 loses errors.
    """
    found = list[tuple[bytes, int, int]]()
    group.links.iterate(lambda name, link: found.append((name, link.type, link.u)), info=True)
    return [(name.decode("utf-8", "surrogateescape"), kind, place) for name, kind, place in found]


def hard_links(group: h5py.Group) -> list[str]:
    """Names in a group that are hard links, not soft or external ones."""
    return [name for name, kind, _ in links(group.id) if kind == h5py.h5l.TYPE_HARD]


def opened(group: h5py.h5g.GroupID, name: str) -> Any:
    """What lies in a group under a name that `links` gives."""
    return h5py.h5o.open(group, name.encode("utf-8", "surrogateescape"))


def array_of(dataset: h5py.Dataset) -> np.ndarray:
    """The whole of a dataset; text as Python strings."""
    if h5py.check_string_dtype(dataset.dtype):
        return _printable(np.asarray(dataset[()], dtype=object))
    return np.asarray(dataset[()])


def _printable(texts: np.ndarray) -> np.ndarray:
    return np.array([python_value(text) for text in texts.ravel()], object).reshape(texts.shape)


class OnDemand(Mapping[str, T]):
    """What lies under names, each of which is read once, when it is asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names, self._read, self.known = dict.fromkeys(names), read, dict[str, T]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> T:
        if name not in self.known:
            if name not in self._names:
                raise KeyError(name)
            self.known[name] = self._read(name)
        return self.known[name]

    def get(self, name: str, default: Any = None) -> Any:  # what of most names is asked, without an error for it
        return self[name] if name in self._names else default


def attributes_of(
    item: ObjectID | Callable[[], Any],
    guard: Guard = contextlib.nullcontext,
    check: Callable[[str, Any], None] | None = None,
    header: Header | None = None,
) -> OnDemand[Any]:
    """Own attributes of a group or an array, read on demand, with values as Python has them; None of several texts."""
    if header is not None:
        sizes = {name: one.size for name, one in sorted(header.attributes.items()) if name not in CONVENTION}
    else:
        named = list[tuple[bytes, int]]()  # decoded afterwards, as `links`
        h5py.h5a.iterate(
            item() if callable(item) else item, lambda name, info: named.append((name, info.data_size)), info=True
        )
        with guard():
            sizes = {text: size for name, size in named if (text := name.decode()) not in CONVENTION}

    def read(name: str) -> Any:
        with guard():
            try:
                if header is None:
                    raise LookupError
                value = python_value(header.value(name))
            except LEFT:
                value = _value(item() if callable(item) else item, name.encode(), sizes[name])
            if check is not None:
                check(name, value)
        return value

    return OnDemand(sizes, read)


def _value(item: ObjectID, name: bytes, size: int) -> Any:
    attribute = h5py.h5a.open(item, name)
    for expected, form in _FORMS.get(size, ()):
        if size == ENTRY or attribute.get_type().equal(form):
            value = np.empty((), expected)
            with contextlib.suppress(OSError, TypeError, ValueError):  # it is something else, or several
                attribute.read(value, mtype=form)
                return python_value(value[()])
    dtype, single = attribute.dtype, attribute.shape == ()
    if not single and dtype.hasobject:  # many texts, which may all be one in the file
        return None
    if not single or not (dtype.kind in "biuf" or h5py.check_string_dtype(dtype)):
        return python_value((h5py.Group if isinstance(item, h5py.h5g.GroupID) else h5py.Dataset)(item).attrs[name])
    value = np.empty((), dtype)
    attribute.read(value)
    return python_value(value[()])


def python_value(value: Any) -> Any:
    """The value of an attribute as Python has it."""
    if isinstance(value, bytes):
        return (_text if len(value) < _SHORT else _text.__wrapped__)(value)
    if isinstance(value, str):
        return printable(value)
    return value.item() if isinstance(value, np.generic) else value


@lru_cache(2**12)
def _text(stored: bytes) -> str:
    return printable(stored.decode())


def scales_of(dataset: h5py.h5d.DatasetID, places: Mapping[int, str]) -> list[list[str]]:
    """Names of the scales of every axis that lie in the dataset's own group."""
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


def places(group: h5py.h5g.GroupID) -> dict[int, str]:
    """Where each array of a group lies in the file: HDF5 searches the whole file for the name of an object."""
    return {place: name for name, kind, place in links(group) if kind == h5py.h5l.TYPE_HARD}


def named(scales: Sequence[Sequence[str]], own: str) -> tuple[str, ...]:
    """Names of the axes of an array after their scales, and after the array where they have none."""
    return tuple(names[0] if names else f"{own}_{i}" for i, names in enumerate(scales))

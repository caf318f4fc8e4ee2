"""Read what an HDF5 file says of an array from its bytes: opening it takes HDF5 ten times as long.

For files as `landscape` writes them: object headers of version 1, numbers in one piece, texts in heaps (the file format
of HDF5, sections III and IV). What has another form is left to HDF5: then there is no header, or its methods raise one
of `LEFT`. No place in the file is trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import h5py
import numpy as np

MOST_BYTES = 2**27  # of a file that is read whole
MOST_MESSAGES = 2000  # of a header; an attribute is one
_HEAP = 2**16  # most bytes of one that is searched
_SPACE, _TYPE, _LAYOUT, _ATTRIBUTE, _CONTINUED = 1, 3, 8, 12, 16  # kinds of messages that are read
_READ = {_SPACE, _TYPE, _LAYOUT, _ATTRIBUTE}
_KNOWN = {*_READ, _CONTINUED, 0, 4, 5, 14, 17, 18}  # and fill values, times, members
_SHARED = 2  # flag of a message that lies elsewhere
_TEXT = bytes.fromhex("190101001000000010000000010000000000080000000000")
_TYPES: Mapping[bytes, np.dtype] = {
    bytes.fromhex("11203f000800000000004000340b0034ff03000000000000"): np.dtype("<f8"),
    bytes.fromhex("10080000080000000000400000000000"): np.dtype("<i8"),
    bytes.fromhex("10000000010000000000080000000000"): np.dtype("u1"),
    _TEXT: np.dtype(object),
}
_MESSAGE, _ATTRIBUTES, _REFERENCE, _ENTRY = map(struct.Struct, ("<HHB", "<BxHHH", "<IQI", "<H6xQ"))
_PREFIX, _PLACE = map(struct.Struct, ("<BxH4xI", "<BBQQ"))
LEFT = (LookupError, struct.error, ValueError, OverflowError)  # what reading anything else raises


class Attribute(NamedTuple):
    """An attribute as it is stored."""

    type: bytes
    shape: tuple[int, ...]
    size: int  # bytes of all its entries
    place: int  # of them in the file


@dataclass(slots=True)
class Header:
    """What a file says of one of its arrays; shape and type are those of a group where there are none."""

    image: Image
    attributes: Mapping[str, Attribute]
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    offset: int
    size: int  # in bytes

    @property
    def is_scale(self) -> bool:
        """Whether it is the scale of an axis."""
        return "CLASS" in self.attributes and self.image.content.startswith(
            b"DIMENSION_SCALE\0", self.attributes["CLASS"].place
        )

    @property
    def content(self) -> memoryview:
        """The bytes of its numbers, or what stands for its texts."""
        return memoryview(self.image.content)[self.offset : self.offset + self.size]

    def array(self) -> np.ndarray:
        """The whole of it; texts as bytes. Raises LEFT: it is left to HDF5."""
        assert self.dtype is not None
        assert self.shape is not None
        if not self.dtype.hasobject:
            return np.frombuffer(self.content, self.dtype).reshape(self.shape).copy()
        found = np.empty(self.shape, object)
        for i in range(found.size):
            found.flat[i] = self.image.text(self.offset + 16 * i)
        return found

    def value(self, name: str) -> bytes | np.generic:
        """An attribute: one number, or one text as bytes. Raises LEFT: it is left to HDF5."""
        attribute = self.attributes[name]
        dtype = _TYPES[attribute.type]
        if attribute.shape:
            raise LookupError
        if dtype.hasobject:
            return self.image.text(attribute.place)
        return np.frombuffer(self.image.content, dtype, 1, attribute.place)[0]  # type: ignore[no-any-return]

    def scales(self, most: int) -> list[list[int]]:
        """Where the scales of every axis lie in the file, `most` of each. Raises LEFT: that is left to HDF5."""
        assert self.shape is not None
        attached, found = self.attributes.get("DIMENSION_LIST"), list[list[int]]()
        if attached is None:
            return [[] for _ in self.shape]
        for axis in range(len(self.shape)):
            count, heap, index = _REFERENCE.unpack_from(self.image.content, attached.place + 16 * axis)
            stored = self.image.stored(heap, index)[: 8 * min(count, most)]
            found.append(list(struct.unpack(f"<{len(stored) // 8}Q", stored)))
        return found


@dataclass
class Image:
    """The bytes of a file, and what is known of its heaps."""

    content: bytes
    _heaps: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _searched: int = 0  # entries that the heaps which were searched may hold

    @classmethod
    def of(cls, file: h5py.File, size: int) -> Image | None:
        """That of an open file; None of one that is large."""
        return cls(file.id.get_file_image()) if size <= MOST_BYTES else None

    def header(self, place: int) -> Header | None:
        """The header of the object at a place; None where it is left to HDF5."""
        try:
            return self._header(place)
        except LEFT:
            return None

    def _header(self, place: int) -> Header:
        content, attributes, shape, dtype, offset, size = self.content, dict[str, Attribute](), None, None, -1, -1
        for kind, at, end in self._messages(place):
            if kind == _ATTRIBUTE:
                name, attribute = self._attribute(at, end)
                attributes[name] = attribute
            elif kind == _SPACE:
                shape = _shape(content, at)
            elif kind == _TYPE:
                dtype = _TYPES[content[at:end]]
            elif kind == _LAYOUT:
                version, storage, offset, size = _PLACE.unpack_from(content, at)
                if (version, storage) != (3, 1):  # in one piece
                    raise LookupError
        if (dtype is None) != (shape is None):
            raise LookupError
        if dtype is not None and shape is not None:
            length = math.prod(shape) * (16 if dtype.hasobject else dtype.itemsize)
            if not 0 < length == size <= len(content) - offset:
                raise LookupError
        return Header(self, attributes, shape, dtype, offset, size)

    def _messages(self, place: int) -> list[tuple[int, int, int]]:
        """Kind, begin and end of every message of a header."""
        content, found, unpack = self.content, list[tuple[int, int, int]](), _MESSAGE.unpack_from
        version, count, size = _PREFIX.unpack_from(content, place)
        if version != 1 or count > MOST_MESSAGES:
            raise LookupError
        blocks = [(place + 16, size)]
        for start, length in blocks:
            at, last = start, min(start + length, len(content))
            while count and at + 8 <= last:
                kind, size, flags = unpack(content, at)
                at, count = at + 8 + size, count - 1
                if at > last or flags & _SHARED or kind not in _KNOWN:
                    raise LookupError
                if kind == _CONTINUED:
                    blocks.append(struct.unpack_from("<QQ", content, at - size))
                elif kind in _READ:
                    found.append((kind, at - size, at))
        if count:
            raise LookupError
        return found

    def _attribute(self, at: int, end: int) -> tuple[str, Attribute]:
        version, name, kind, axes = _ATTRIBUTES.unpack_from(self.content, at)
        type_at = at + 8 + (name + 7 & -8)  # each begins at a multiple of 8
        place = type_at + (kind + 7 & -8) + (axes + 7 & -8)
        text, dtype, shape, size = _described(self.content[at + 8 : place], name, kind)
        if version != 1 or place + size > end:
            raise LookupError
        return text, Attribute(dtype, shape, size, place)

    def text(self, place: int) -> bytes:
        """The text that the 16 bytes at a place refer to. Raises LEFT: it is left to HDF5."""
        length, heap, index = _REFERENCE.unpack_from(self.content, place)
        found = self.stored(heap, index)
        if len(found) < length:
            raise LookupError
        return found[:length].partition(b"\0")[0]

    def stored(self, heap: int, index: int) -> bytes:
        """The bytes of an entry of a heap. Raises LEFT: it is left to HDF5."""
        if heap not in self._heaps:
            self._heaps[heap] = self._entries(heap)
        start, size = self._heaps[heap][index]
        return self.content[start : start + size]

    def _entries(self, heap: int) -> dict[int, tuple[int, int]]:
        signature, size = struct.unpack_from("<5s3xQ", self.content, heap)
        if signature != b"GCOL\1" or size > min(_HEAP, len(self.content) - heap) or self._searched > len(self.content):
            raise LookupError
        self._searched += size // 16
        content, found, unpack = self.content, dict[int, tuple[int, int]](), _ENTRY.unpack_from
        at, last = heap + 16, heap + size - 16
        while at <= last:
            index, length = unpack(content, at)
            if not index:  # what is free
                break
            if length > last - at:
                raise LookupError
            found[index] = at + 16, length
            at += 16 + (length + 7 & -8)
        return found


@lru_cache(2**10)
def _described(stored: bytes, name: int, kind: int) -> tuple[str, bytes, tuple[int, ...], int]:
    """Name, type, shape and size of an attribute by its bytes, which those of many arrays have in common."""
    type_at = name + 7 & -8
    axes_at = type_at + (kind + 7 & -8)
    shape = _shape(stored, axes_at)
    size = int.from_bytes(stored[type_at + 4 : type_at + 8], "little") * math.prod(shape)
    return stored[:name].partition(b"\0")[0].decode(), stored[type_at:axes_at], shape, size


def _shape(content: bytes, at: int) -> tuple[int, ...]:
    version, axes, flags = content[at], content[at + 1], content[at + 2]
    if version != 1 or axes > 32 or flags > 1:
        raise LookupError
    return struct.unpack_from(f"<{axes}Q", content, at + 8) if axes else ()

"""Read what an HDF5 file says of an array from its bytes: opening it takes HDF5 ten times as long.

For files as `landscape` writes them: object headers of version 1, numbers in one piece, texts in heaps (the file format
of HDF5, sections III and IV). What has another form is left to HDF5: then there is no header, or its methods raise one
of `LEFT`. No place in the file is trusted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import h5py
import numpy as np

MOST_BYTES = 2**27  # of a file that is read whole
MOST_MESSAGES = 2000  # of a header; an attribute is one
_HEAP = 2**16  # most bytes of one that is searched
_SPACE, _TYPE, _LAYOUT, _ATTRIBUTE, _CONTINUED = 1, 3, 8, 12, 16  # kinds of messages that are read
_KNOWN = {_SPACE, _TYPE, _LAYOUT, _ATTRIBUTE, _CONTINUED, 0, 4, 5, 14, 17, 18}  # and fill values, times, members
_SHARED = 2  # flag of a message that lies elsewhere
_TEXT = bytes.fromhex("190101001000000010000000010000000000080000000000")
_TYPES: Mapping[bytes, np.dtype] = {
    bytes.fromhex("11203f000800000000004000340b0034ff03000000000000"): np.dtype("<f8"),
    bytes.fromhex("10080000080000000000400000000000"): np.dtype("<i8"),
    bytes.fromhex("10000000010000000000080000000000"): np.dtype("u1"),
    _TEXT: np.dtype(object),
}
_MESSAGE, _ATTRIBUTES, _REFERENCE, _ENTRY = map(struct.Struct, ("<HHB", "<BxHHH", "<IQI", "<H6xQ"))
LEFT = (LookupError, struct.error, ValueError, OverflowError)  # what reading anything else raises


class Attribute(NamedTuple):
    """An attribute as it is stored."""

    type: bytes
    shape: tuple[int, ...]
    size: int  # bytes of all its entries
    place: int  # of them in the file


@dataclass(frozen=True)
class Header:
    """What a file says of one of its arrays; shape and type are those of a group where there are none."""

    image: Image
    attributes: Mapping[str, Attribute]
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    offset: int

    @property
    def is_scale(self) -> bool:
        """Whether it is the scale of an axis."""
        return "CLASS" in self.attributes and self.image.content.startswith(
            b"DIMENSION_SCALE\0", self.attributes["CLASS"].place
        )

    def array(self) -> np.ndarray:
        """The whole of it; texts as bytes.

        Raises:
            LEFT: it is left to HDF5.
        """
        assert self.dtype is not None
        assert self.shape is not None
        if not self.dtype.hasobject:
            count = math.prod(self.shape)
            return np.frombuffer(self.image.content, self.dtype, count, self.offset).reshape(self.shape).copy()
        found = np.empty(self.shape, object)
        for i in range(found.size):
            found.flat[i] = self.image.text(self.offset + 16 * i)
        return found

    def value(self, name: str) -> bytes | np.generic:
        """An attribute: one number, or one text as bytes.

        Raises:
            LEFT: it is left to HDF5.
        """
        attribute = self.attributes[name]
        dtype = _TYPES[attribute.type]
        if attribute.shape:
            raise LookupError
        if dtype.hasobject:
            return self.image.text(attribute.place)
        return np.frombuffer(self.image.content, dtype, 1, attribute.place)[0]  # type: ignore[no-any-return]

    def scales(self, most: int) -> list[list[int]]:
        """Where the scales of every axis lie in the file, `most` of each.

        Raises:
            LEFT: that is left to HDF5.
        """
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
    _searched: int = 0  # entries of heaps

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
                attributes.update([self._attribute(at, end)])
            elif kind == _SPACE:
                shape = _shape(content, at)
            elif kind == _TYPE:
                dtype = _TYPES[content[at:end]]
            elif kind == _LAYOUT:
                version, storage, offset, size = struct.unpack_from("<BBQQ", content, at)
                if (version, storage) != (3, 1):  # in one piece
                    raise LookupError
        if (dtype is None) != (shape is None):
            raise LookupError
        if dtype is not None and shape is not None:
            length = math.prod(shape) * (16 if dtype.hasobject else dtype.itemsize)
            if not 0 < length == size <= len(content) - offset:
                raise LookupError
        return Header(self, dict(sorted(attributes.items())), shape, dtype, offset)

    def _messages(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Kind, begin and end of every message of a header."""
        version, count, size = struct.unpack_from("<BxH4xI", self.content, place)
        if version != 1 or count > MOST_MESSAGES:
            raise LookupError
        blocks = [(place + 16, size)]
        for start, length in blocks:
            at, last = start, min(start + length, len(self.content))
            while count and at + 8 <= last:
                kind, size, flags = _MESSAGE.unpack_from(self.content, at)
                at, count = at + 8 + size, count - 1
                if at > last or flags & _SHARED or kind not in _KNOWN:
                    raise LookupError
                if kind == _CONTINUED:
                    blocks.append(struct.unpack_from("<QQ", self.content, at - size))
                else:
                    yield kind, at - size, at
        if count:
            raise LookupError

    def _attribute(self, at: int, end: int) -> tuple[str, Attribute]:
        content = self.content
        version, name, kind, axes = _ATTRIBUTES.unpack_from(content, at)
        type_at = at + 8 + (name + 7 & -8)  # each begins at a multiple of 8
        axes_at = type_at + (kind + 7 & -8)
        place, shape = axes_at + (axes + 7 & -8), _shape(content, axes_at)
        size = int.from_bytes(content[type_at + 4 : type_at + 8], "little") * math.prod(shape)
        if version != 1 or place + size > end:
            raise LookupError
        text = content[at + 8 : at + 8 + name].partition(b"\0")[0].decode()
        return text, Attribute(content[type_at : type_at + (kind + 7 & -8)], shape, size, place)

    def text(self, place: int) -> bytes:
        """The text that the 16 bytes at a place refer to.

        Raises:
            LEFT: it is left to HDF5.
        """
        length, heap, index = _REFERENCE.unpack_from(self.content, place)
        found = self.stored(heap, index)
        if len(found) < length:
            raise LookupError
        return found[:length].partition(b"\0")[0]

    def stored(self, heap: int, index: int) -> bytes:
        """The bytes of an entry of a heap.

        Raises:
            LEFT: it is left to HDF5.
        """
        if heap not in self._heaps:
            self._heaps[heap] = self._entries(heap)
        start, size = self._heaps[heap][index]
        return self.content[start : start + size]

    def _entries(self, heap: int) -> dict[int, tuple[int, int]]:
        signature, size = struct.unpack_from("<5s3xQ", self.content, heap)
        if signature != b"GCOL\1" or size > min(_HEAP, len(self.content) - heap) or self._searched > len(self.content):
            raise LookupError
        found, at = dict[int, tuple[int, int]](), heap + 16
        while at + 16 <= heap + size:
            index, length = _ENTRY.unpack_from(self.content, at)
            if not index:  # what is free
                break
            if length > heap + size - at - 16:
                raise LookupError
            found[index] = at + 16, length
            at += 16 + (length + 7 & -8)
            self._searched += 1
        return found


def _shape(content: bytes, at: int) -> tuple[int, ...]:
    version, axes, flags = content[at], content[at + 1], content[at + 2]
    if version != 1 or axes > 32 or flags > 1:
        raise LookupError
    return struct.unpack_from(f"<{axes}Q", content, at + 8) if axes else ()

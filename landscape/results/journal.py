"""Keep finished units in an append-only journal: one write of length, CRC and payload per record.

After a kill at any moment every acknowledged record is there and at most the last one is torn; the next writer that
opens the file cuts a torn tail. While its writer lives, the journal is locked exclusively.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

MAGIC = b"landscape journal 1\n"
_HEAD = struct.Struct("<II")  # payload length, CRC-32 of the payload


class Busy(RuntimeError):
    """Another living process holds the journal."""


@dataclass(frozen=True)
class Record:
    """Plain data and the arrays that go with it."""

    data: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Journal:
    """A journal opened for writing, exclusively; a context manager.

    Raises:
        Busy: another process is writing it.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _locked(path)
        try:
            self._end = _valid_end(self._file)
            os.ftruncate(self._file, self._end)
            if self._end == 0:
                self._write(MAGIC)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: Record) -> None:
        """Add one record; when this returns, a kill cannot lose it."""
        payload = _encode(record)
        self._write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)

    def records(self) -> Iterator[Record]:
        """Every whole record, oldest first."""
        return _records(self._file, self._end)

    def clear(self) -> None:
        """Drop all records, once they are merged."""
        os.ftruncate(self._file, len(MAGIC))
        self._end = len(MAGIC)

    def remove(self) -> None:
        """Delete the file, still under its lock."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            written = os.pwrite(self._file, data, self._end)
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}; free some space, then run again") from error
        if written != len(data):
            raise OSError(f"cannot write {self.path}: the disk is full; free some space, then run again")
        self._end += written


def _locked(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise Busy(f"{path} is being written by another process") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)  # its writer removed the file between our open and our lock


def _valid_end(handle: int) -> int:
    """Offset of the end of the last whole record; 0 for an empty file or one that is not a journal."""
    size = os.fstat(handle).st_size
    if os.pread(handle, len(MAGIC), 0) != MAGIC:
        return 0
    end = len(MAGIC)
    while end + _HEAD.size <= size:
        length, crc = _HEAD.unpack(os.pread(handle, _HEAD.size, end))
        payload = os.pread(handle, length, end + _HEAD.size) if end + _HEAD.size + length <= size else b""
        if not payload or len(payload) != length or zlib.crc32(payload) != crc:
            break  # no payload: the zero bytes that a power cut leaves read as length 0 with a matching CRC
        end += _HEAD.size + length
    return end


def _records(handle: int, end: int) -> Iterator[Record]:
    offset = len(MAGIC)
    while offset < end:
        length, _ = _HEAD.unpack(os.pread(handle, _HEAD.size, offset))
        yield _decode(os.pread(handle, length, offset + _HEAD.size))
        offset += _HEAD.size + length


def _encode(record: Record) -> bytes:
    arrays = {name: np.asarray(value) for name, value in record.arrays.items()}
    shapes = [[name, value.dtype.str, list(value.shape)] for name, value in arrays.items()]
    head = json.dumps({"data": record.data, "arrays": shapes}).encode()
    return b"".join([struct.pack("<I", len(head)), head, *(value.tobytes() for value in arrays.values())])


def _decode(payload: bytes) -> Record:
    (length,) = struct.unpack_from("<I", payload)
    head = json.loads(payload[4 : 4 + length])
    arrays, offset = {}, 4 + length
    for name, dtype, shape in head["arrays"]:
        arrays[name] = np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape)
        offset += arrays[name].nbytes
    return Record(head["data"], arrays)

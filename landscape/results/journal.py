"""Keep finished units in an append-only journal: one write of length, CRC and payload per record.

After a kill at any moment every acknowledged record is there and at most the last one is torn; the next writer that
opens the file cuts a torn tail. While its writer lives, the journal is locked exclusively. A record that turned bits
made unreadable costs no other one, and a file that is not a journal is never written to.
"""

import contextlib
import fcntl
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"landscape journal 1\n"
_HEAD = struct.Struct("<II")  # payload length, CRC-32 of the payload
_START = b'{"data": '  # of every payload, behind the length of its text
_SEARCHED = 2**31  # most bytes whose checksums are computed behind damage
_OPENED = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # without blocking on a pipe of that name


class Busy(RuntimeError):
    """Another living process holds the journal."""


class NotAJournal(OSError):
    """A link, a folder or a pipe lies where a journal is expected; it is left alone."""


@dataclass(frozen=True)
class Record:
    """Plain data and the arrays that go with it."""

    data: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class Journal(contextlib.AbstractContextManager["Journal"]):
    """A journal opened for writing, exclusively; a context manager. `sync`: each record is flushed to the disk.

    `unreadable` says in words what of the file cannot be read; such a file takes no records until `set_aside` gives it
    another name.

    Raises:
        Busy: another process is writing it.
        OSError: the folder cannot be written, or something else has the journal's name.
    """

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self.path, self._sync = path, sync
        self._open()

    def append(self, record: Record) -> None:
        if self.unreadable:
            raise ValueError(f"{self.path} cannot be read; it must be set aside before anything is added")
        payload = _encode(record)
        self._write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)

    def records(self) -> Iterator[Record]:
        return _records(_content(self._file))

    def clear(self, *, keep: int = 0) -> None:
        """Drop all records but the first `keep`, once they are merged."""
        spans, _ = _scan(_content(self._file))
        self._end = sum(spans[keep - 1]) if keep and spans else len(MAGIC)
        os.ftruncate(self._file, self._end)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Keep the file under another name, which no journal has, and go on with an empty one; returns that name."""
        name, number = self.path.name.replace(".journal-", ".unreadable-"), 1
        while os.path.lexists(kept := self.path.with_name(name + (f"-{number}" if number > 1 else ""))):
            number += 1
        self.path.rename(kept)
        os.close(self._file)
        self._open()
        return kept

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def _open(self) -> None:
        self._file = _locked(self.path)
        try:
            content = _content(self._file)
            spans, self.unreadable = _scan(content)
            if self.unreadable:
                self._end = len(content)
                return
            whole = content.startswith(MAGIC)
            self._end = sum(spans[-1]) if spans else len(MAGIC) * whole
            os.ftruncate(self._file, self._end)
            if not whole:
                self._write(MAGIC)
        except BaseException:
            os.close(self._file)
            raise

    def _write(self, data: bytes) -> None:
        try:
            written = os.pwrite(self._file, data, self._end)
            if self._sync:
                os.fsync(self._file)
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}; free some space, then run again") from error
        if written != len(data):
            raise OSError(f"cannot write {self.path}: the disk is full; free some space, then run again")
        self._end += written


def records_of(path: Path) -> list[Record]:
    """The readable records of a journal that may be in use: nothing is locked, created or changed.

    Raises:
        NotAJournal: it is something else, or gone.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise NotAJournal(f"{path} cannot be read ({error.strerror})") from error
    try:
        content = _content(handle) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
        if not content.startswith(MAGIC):
            raise NotAJournal(f"{path} is not a journal")
        return list(_records(content))
    finally:
        os.close(handle)


def _locked(path: Path) -> int:
    while True:
        try:
            handle = os.open(path, _OPENED | os.O_CREAT, 0o666)
        except OSError as error:
            if path.is_symlink() or (os.path.lexists(path) and not path.is_file()):
                raise NotAJournal(f"{path} is not a file of this program, whose name it has; move it away") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise NotAJournal(f"{path} is not a file of this program, whose name it has; move it away")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.lstat(path)):
                    return handle
        except BlockingIOError:
            os.close(handle)
            raise Busy(f"{path} is being written by another process") from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its writer removed the file between our open and our lock


def _content(handle: int) -> bytes:
    with open(handle, "rb", closefd=False) as stream:
        stream.seek(0)
        return stream.read()


def _records(content: bytes) -> Iterator[Record]:
    for offset, length in _scan(content)[0]:
        yield _decode(content[offset : offset + length])


def _scan(content: bytes) -> tuple[list[tuple[int, int]], str]:
    """Offset and length of every readable payload, and in words what else the file holds, except for a torn tail."""
    if not content.startswith(MAGIC):
        torn = len(content) <= len(MAGIC) and (MAGIC.startswith(content) or not content.strip(b"\0"))
        return [], "" if torn else f"its {len(content):,} bytes are no journal of this version"
    spans: list[tuple[int, int]] = []
    end, damaged, missing, searched = len(MAGIC), 0, 0, 0
    while end < len(content):
        span = _payload(content, end)
        if span is not None:
            spans.append(span)
            end = sum(span)
            continue
        following, searched = _next(content, end, searched)
        if following is None and _torn(content[end:]):
            break
        following = len(content) if following is None else following
        damaged, missing, end = damaged + 1, missing + following - end, following
    if not damaged:
        return spans, ""
    typical = sorted(length for _, length in spans)[len(spans) // 2] + _HEAD.size if spans else missing
    lost = max(damaged, round(missing / typical))
    return spans, f"about {lost:,} of {len(spans) + lost:,} records cannot be read, a record being a unit"


def _payload(content: bytes, start: int) -> tuple[int, int] | None:
    """Offset and length of the payload of a whole record; None where there is none."""
    if start + _HEAD.size > len(content):
        return None
    length, crc = _HEAD.unpack_from(content, start)
    begin = start + _HEAD.size
    # No payload: the zero bytes that a power cut leaves read as length 0 with a matching CRC.
    if not length or begin + length > len(content) or zlib.crc32(memoryview(content)[begin : begin + length]) != crc:
        return None
    return begin, length


def _next(content: bytes, start: int, searched: int) -> tuple[int | None, int]:
    """Start of the next whole record behind an unreadable one, found by how every payload begins; None if none.

    With it, how many bytes were looked through in all, of which there is a limit: starts may be false.
    """
    at = content.find(_START, start + 1)
    while at >= 0 and searched < _SEARCHED:
        begin = at - 4 - _HEAD.size
        if begin > start:
            length = _HEAD.unpack_from(content, begin)[0]
            searched += length if length <= len(content) - begin else 0
            if _payload(content, begin) is not None:
                return begin, searched
        at = content.find(_START, at + 1)
    return None, searched


def _torn(rest: bytes) -> bool:
    """Whether the end of a file is what a kill or a power cut leaves of a record: a part of it, or zeros."""
    if len(rest) < _HEAD.size or not rest.strip(b"\0"):
        return True
    return bool(_HEAD.size + _HEAD.unpack_from(rest)[0] > len(rest))


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

"""Recover the intact results of a damaged file: of one that was cut, overwritten in part, or lost its directory.

A result is intact if its group, all its arrays, their axes and attributes can be read and lie within the file. Nothing
in an HDF5 file as this project writes it tells whether bits turned inside an array.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from landscape.results import group as groups
from landscape.results.hdf5_file import hard_links
from landscape.results.reader import dataset_of
from landscape.results.updating import change_file

SUPERBLOCK = 96  # bytes at the start of a file: signature, its length, the place of its root group
_LENGTH, _ROOT = 40, 64  # where in them
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_GROUP = re.compile(rb"\x01\x00..\x01\x00\x00\x00..\x00\x00.{4}[\x10\x11]\x00\x10\x00", re.DOTALL)  # how a group begins
_NAME = re.compile(r"(.+)-[0-9a-f]{10}")
_PADDING = 2**26  # most bytes that are added to a file that was cut


@dataclass(frozen=True)
class Repaired:
    """The groups that are in the new file, and what is gone, in words."""

    kept: list[str]
    gone: list[str]


def repair(path: Path, out: Path) -> Repaired:
    """Write every intact result of a damaged file into a new one; nothing is written where nothing is damaged.

    HDF5 may crash on damaged bytes, so that everything is tried in a child process first.

    Raises:
        FileNotFoundError, ValueError: there is no such file, `out` exists, or no result can be recovered.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no results file at {path}; give the damaged file")
    if os.path.lexists(out):
        raise ValueError(f"{out} exists; give another --out")
    content = path.read_bytes()
    whole = _as_stored(content)
    listed: list[str] | None = _in_child(lambda: _names(content)) if whole else None
    gone, places = [], dict[str, int | None]()
    if listed is None:
        gone.append(f"the end of the file, behind {len(content):,} bytes" if _cut(content) else "the list of results")
    names = listed if listed is not None else _in_child(lambda: _names(_readable(content))) or []
    damaged = {}
    for name in names:
        reason = _in_child(lambda name=name: _flaw(_readable(content), name, len(content)))  # type: ignore[misc]
        if reason == "":
            places[name] = None
        else:
            damaged[name] = reason or "HDF5 crashes on it"
    if gone or damaged:
        for name, place in _unlisted(content, set(places)):
            places[name] = place
            damaged.pop(name, None)
    gone += [f"{name} ({reason})" for name, reason in sorted(damaged.items())]
    if gone and not places:
        raise ValueError(f"{path} holds no result that can be recovered; gone: {', '.join(gone)}")
    if gone:
        change_file(out, lambda file: _copy_all(content, places, file))
    return Repaired(sorted(places), gone)


def _copy_all(content: bytes, places: dict[str, int | None], file: h5py.File) -> None:
    for name, place in sorted(places.items()):
        with h5py.File(io.BytesIO(_readable(content, place)), "r") as damaged:
            groups.copy(damaged[name] if place is None else damaged["/"], file, name)


def _as_stored(content: bytes) -> bool:
    """Whether the start of the file fits its length."""
    return content.startswith(_SIGNATURE) and not _cut(content)


def _cut(content: bytes) -> bool:
    """Whether the file is shorter than it says."""
    return content.startswith(_SIGNATURE) and len(content) < _declared(content)


def _declared(content: bytes) -> int:
    (length,) = struct.unpack_from("<Q", content.ljust(SUPERBLOCK, b"\0"), _LENGTH)
    return int(length) if length < len(content) + _PADDING else len(content)


def _readable(content: bytes, root: int | None = None) -> bytes:
    """The file with a sound start, as long as it was, and another group as its root if given."""
    empty = io.BytesIO()
    h5py.File(empty, "w").close()
    start = bytearray(empty.getvalue()[:SUPERBLOCK])
    length = max(len(content), _declared(content))
    struct.pack_into("<Q", start, _LENGTH, length)
    if root is not None:
        struct.pack_into("<QI", start, _ROOT, root, 0)  # 0: nothing about the group is cached here
    return (bytes(start) + content[SUPERBLOCK:]).ljust(length, b"\0")


def _names(content: bytes) -> list[str]:
    """Every `<probe>/<result>` that the file lists."""
    with h5py.File(io.BytesIO(content), "r") as file:
        found = []
        for probe in hard_links(file):
            try:
                found += [f"{probe}/{name}" for name in hard_links(file[probe])]
            except Exception:  # whatever HDF5 raises on damaged bytes
                found.append(f"{probe}/*")
        return found


def _flaw(content: bytes, name: str, size: int) -> str:
    """What of a result cannot be read; "" if it is intact. `size`: of the file, before it was padded."""
    try:
        with h5py.File(io.BytesIO(content), "r") as file, h5py.File(io.BytesIO(), "w") as copied:
            group = file[name]
            arrays = groups.places(group)
            for array in arrays.values():
                offset = group[array].id.get_offset()
                if offset is not None and offset + group[array].id.get_storage_size() > size:
                    return f"{array} is lost"
                axes = groups.dims(group[array], array, arrays)
                if not group[array].is_scale and any(axis not in arrays.values() for axis in axes):
                    return f"the axes of {array} are lost"
            about = groups.copy(group, copied, "copy").attrs
            if "probe" not in about or "label" not in about or "done" not in group:
                return "its attributes are lost"
            dataset_of(copied["copy"], name.partition("/")[0] or str(about["probe"]))
    except Exception as error:  # whatever HDF5 raises on damaged bytes
        return " ".join(str(error).split())[:120] or type(error).__name__
    return ""


def _unlisted(content: bytes, known: set[str]) -> Iterator[tuple[str, int]]:
    """Name and place of intact results that lie in the file and that it does not list any more."""
    for match in _GROUP.finditer(content):
        place = match.start()
        about = _in_child(lambda place=place: _result_at(content, place))  # type: ignore[misc]
        if about:
            name = f"{about[0]}/{_link_name(content, place) or about[1] + '-' + format(place, '010x')}"
            if name not in known:
                known.add(name)
                yield name, place


def _result_at(content: bytes, place: int) -> list[str] | None:
    """Probe and label of the intact result at a place in the file; None if there is none."""
    readable = _readable(content, place)
    with h5py.File(io.BytesIO(readable), "r") as file:
        if "probe" not in file.attrs:
            return None
        about = [str(file.attrs["probe"]), re.sub(r"[^\w.+-]", "_", str(file.attrs.get("label", "")))]
    return None if _flaw(readable, "/", len(content)) else about


def _link_name(content: bytes, place: int) -> str:
    """Name under which the group at a place was listed: a table holds an offset beside the place, a heap the name."""
    at = content.find(struct.pack("<Q", place))
    while at >= 8:
        (offset,) = struct.unpack_from("<Q", content, at - 8)
        for heap in re.finditer(b"HEAP\0", content):
            (start,) = struct.unpack_from("<Q", content.ljust(heap.start() + 32, b"\0"), heap.start() + 24)
            text = content[start + offset : start + offset + 500].partition(b"\0")[0].decode(errors="replace")
            if _NAME.fullmatch(text):
                return text
        at = content.find(struct.pack("<Q", place), at + 1)
    return ""


def _in_child(call: Callable[[], Any]) -> Any:
    """What a function of plain data returns, from a child process; None if that crashes or fails."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(write, "w") as stream:
                json.dump(call(), stream)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    try:
        return json.loads(said)
    except ValueError:
        return None

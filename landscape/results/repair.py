"""Recover the intact results of a damaged file: of one that was cut, overwritten in part, or lost its directory.

A result is intact if its group, all its arrays, their axes and attributes can be read and lie within the file, and have
the checksum that is stored with them.
"""

from __future__ import annotations

import io
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.results import group as groups
from landscape.results.children import ROOM, Children
from landscape.results.handles import Handle, attributes_of, hard_links, named, opened, places
from landscape.results.hdf5_file import CHECK, FORMAT, Limits, longest_text
from landscape.results.malformed import check_array, check_attributes, check_done
from landscape.results.object_headers import MOST_BYTES, Image
from landscape.results.replacing import replacing
from landscape.results.run_key import safe_label
from landscape.results.updating import locked

SUPERBLOCK = 96  # bytes at the start of a file: signature, its length, the place of its root group
_LENGTH, _ROOT = 40, 64  # where in them
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# How a group begins: with the place of its members, with what continues it, or, if it was copied, with an attribute.
_GROUP = re.compile(rb"\x01\x00..\x01\x00\x00\x00..\x00\x00.{4}(?:[\x10\x11]\x00\x10\x00|\x0c\x00)", re.DOTALL)
_LINK = re.compile(rb"-([0-9a-f]{10})\0")  # how the name of a result ends
_NAME = 2000  # most bytes of one
_PADDING = 2**26  # most bytes that are added to a file that was cut
SECONDS, BYTES_PER_SECOND = 10, 2**21  # of processor time: so many, and one more for so many bytes of the file

Place = str | int  # of a group: its name in the file, or where it begins


@dataclass(frozen=True)
class Repaired:
    """The groups that are in the new file, and what is gone, in words."""

    kept: list[str]
    gone: list[str]


def repair(path: Path, out: Path, *, progress: Callable[[str], None] = lambda said: None) -> Repaired:
    """Write every intact result of a damaged file into a new one; nothing is written where nothing is damaged.

    HDF5 may crash on damaged bytes or search them without end, so that everything is tried first in child processes
    of limited memory and processor time. `progress` is called with the state of the search, in words.

    Raises:
        FileNotFoundError, ValueError: there is no such file, `out` exists, or no result can be recovered.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no results file at {path}; give the damaged file")
    _refuse(out)
    content = path.read_bytes()
    image, children = _readable(content), Children(SECONDS + len(content) / BYTES_PER_SECOND, progress)
    places, gone, damaged = dict[str, Place](), list[str](), dict[str, str]()
    begin = set[int]()  # where the results begin that are kept
    names = children.one(lambda: _names(content)) if content.startswith(_SIGNATURE) and not _cut(content) else None
    if names is None:
        gone.append(f"the end of the file, behind {len(content):,} bytes" if _cut(content) else "the list of results")
        names = children.one(lambda: _names(image))
    if names is None:
        image, names = _with_another_root(image, children, len(content)), []
    for name, found in children.each(lambda some: _examined(image, some, len(content)), names):
        if found and not found[0] and name.endswith(found[3]):
            places[name] = name
            begin.add(found[4])
        else:
            damaged[name] = (found[0] or "its name is lost") if found else "HDF5 crashes on it"
    if gone or damaged or children.left <= 0:
        for name, place in _unlisted(image, children, len(content), begin, set(places)):
            places[name] = place
            damaged.pop(name, None)
        if children.left <= 0:
            gone.append(f"what is not found within {children.seconds:.0f} s")
        damaged |= _write(image, places, out, progress)
    gone += [f"{name} ({reason})" for name, reason in sorted(damaged.items())]
    if gone and not places:
        raise ValueError(f"{path} holds no result that can be recovered; gone: {', '.join(gone)}")
    return Repaired(sorted(places), gone)


def _refuse(out: Path) -> None:
    if os.path.lexists(out):
        raise ValueError(f"{out} exists; give another --out")


def _write(image: bytes, found: dict[str, Place], out: Path, progress: Callable[[str], None]) -> dict[str, str]:
    """Write results into a new file, which one child makes of all; what cannot be copied leaves `found`, with why.

    Where HDF5 crashes on one, all others are copied again.
    """
    lost = dict[str, str]()
    children = Children(SECONDS + len(image) / BYTES_PER_SECOND, progress, room=ROOM + 4 * len(image))
    with mmap.mmap(-1, 2 * len(image) + _PADDING) as shared:  # with the child: how many bytes, and they
        while found and not (size := int.from_bytes(shared[:8], "little")):
            for name, said in children.each(lambda some: _copied(image, found, some, shared), list(found)):
                if said != "":
                    lost[name] = said or "HDF5 crashes on it"
                    del found[name]
                if said is None:
                    break
            if children.left <= 0:
                lost |= dict.fromkeys(found, f"it is not copied within {children.seconds:.0f} s")
                found.clear()
        if found:
            out.parent.mkdir(parents=True, exist_ok=True)
            with locked(out), replacing(out) as stream:
                _refuse(out)
                stream.write(memoryview(shared)[8 : 8 + size])
    return lost


def _copied(image: bytes, found: Mapping[str, Place], names: Sequence[str], shared: mmap.mmap) -> Iterator[str]:
    """Copy results into one file in memory, which is `shared` after the last; why one cannot be copied, or ""."""
    headers, said = _headers(image), ""
    with _opened(image) as damaged, h5py.File("copied", "w", driver="core", backing_store=False) as file:
        file.attrs["format"] = FORMAT
        for name, at in zip(names, _references([found[name] for name in names]), strict=True):
            if name != names[0]:
                yield said
            try:
                groups.copy(source := damaged[at], file, name, _arrays(source, places(source.id), headers))
                said = ""
            except Exception as error:  # whatever HDF5 raises on damaged bytes
                said = _reason(error)
                if name in file:
                    del file[name]
        file.flush()
        whole = file.id.get_file_image()
        shared[:8], shared[8 : 8 + len(whole)] = len(whole).to_bytes(8, "little"), whole
        yield said


def _headers(image: bytes) -> Image | None:
    return Image(image) if len(image) <= MOST_BYTES else None


def _cut(content: bytes) -> bool:
    """Whether the file is shorter than it says."""
    return content.startswith(_SIGNATURE) and len(content) < _declared(content)


def _declared(content: bytes) -> int:
    (length,) = struct.unpack_from("<Q", content.ljust(SUPERBLOCK, b"\0"), _LENGTH)
    return int(length) if length < len(content) + _PADDING else len(content)


def _readable(content: bytes) -> bytes:
    """The file with a sound start, as long as it was."""
    empty = io.BytesIO()
    h5py.File(empty, "w").close()
    start = bytearray(empty.getvalue()[:SUPERBLOCK])
    length = max(len(content), _declared(content))
    struct.pack_into("<Q", start, _LENGTH, length)
    return (bytes(start) + content[SUPERBLOCK:]).ljust(length, b"\0")


def _opened(image: bytes) -> h5py.File:
    return h5py.File(h5py.h5f.open_file_image(image))


def _names(content: bytes) -> list[str]:
    """Every `<probe>/<result>` that the file lists."""
    with _opened(content) as file:
        found = []
        for probe in hard_links(file):
            try:
                found += [f"{probe}/{name}" for name in hard_links(file[probe])]
            except Exception:  # whatever HDF5 raises on damaged bytes
                found.append(f"{probe}/*")
        return found


def _references(places: Sequence[Place]) -> list[Any]:
    """What h5py opens at each place: names as they are, and for a number a reference, which holds nothing else."""
    numbers = [place for place in places if isinstance(place, int)]
    if not numbers:
        return list(places)
    with h5py.File("references", "w", driver="core", backing_store=False) as file:
        stored = file.create_dataset("at", (len(numbers),), h5py.ref_dtype, chunks=(len(numbers),))
        stored.id.write_direct_chunk((0,), np.asarray(numbers, "<u8").tobytes())
        references = iter(stored[()])
    return [next(references) if isinstance(place, int) else place for place in places]


def _examined(image: bytes, places: Sequence[Place], size: int) -> Iterator[list[Any]]:
    """Of the group at each place what cannot be read, "" if it is intact, its probe, label and digest, where it begins.

    `size` is that of the file before it was padded.
    """
    longest, headers = longest_text([image], len(image)), _headers(image)
    with _opened(image) as file:
        for place, at in zip(places, _references(places), strict=True):
            if str(place).endswith("/*"):
                yield ["the list of these results is lost"]
                continue
            try:
                group = file[at]
                begin = h5py.h5o.get_info(group.id).addr
                about = dict(attributes_of(group.id, header=headers.header(begin) if headers else None))
                probe = place.partition("/")[0] if isinstance(place, str) else str(about.get("probe"))
                identity = [probe, str(about.get("label", "")), str(about.get("digest", ""))]
                flaw = _flaw(group, about, probe, size, longest, headers)
                yield [flaw, *identity, begin]
            except Exception as error:  # whatever HDF5 raises on damaged bytes
                yield [_reason(error)]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _flaw(
    group: h5py.Group, about: Mapping[str, Any], probe: str, size: int, longest: int, headers: Image | None
) -> str:
    where = places(group.id)
    if not {"probe", "label"} <= set(about) or "done" not in where.values():
        return "its attributes are lost"
    arrays, limits = _arrays(group, where, headers), Limits("it", size, longest=longest)
    limits.add(group.id)
    for name, array in arrays.items():
        if array.end > size:
            return f"{name} is lost"
        limits.add(array, name)
        check_array(name, array)
    shapes = {name: array.shape or () for name, array in arrays.items()}
    sizes = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
    scales = {name: array.scales(where) for name, array in arrays.items()}
    for name, own in scales.items():
        axes = () if own is None else zip(named(own, name), shapes[name], strict=True)
        if any(sizes.get(axis) != length for axis, length in axes):
            return f"the axes of {name} are lost"
    if about.get(CHECK) != groups.checksum(group, arrays, about):
        return "it is not as it was stored"
    check_attributes(about, probe)
    check_done(arrays["done"].array())
    return ""


def _arrays(group: h5py.Group, where: Mapping[int, str], headers: Image | None) -> dict[str, Handle]:
    found = dict[str, Handle]()
    for place, name in where.items():
        header = headers.header(place) if headers else None
        if header is not None and header.dtype is not None:
            found[name] = Handle(partial(opened, group.id, name), header)
        elif isinstance(item := opened(group.id, name), h5py.h5d.DatasetID):
            found[name] = Handle(item)
    return found


def _with_another_root(image: bytes, children: Children, size: int) -> bytes:
    """The file with the first of its groups that can be opened as its root; as it is if there is none."""

    def rooted(place: int) -> bytes:
        return image[:_ROOT] + struct.pack("<QI", place, 0) + image[_ROOT + 12 :]  # 0: nothing of it is cached here

    for place, opens in children.each(lambda some: (bool(_opened(rooted(one))) for one in some), _groups(image, size)):
        if opens:
            return rooted(place)
    return image


def _groups(image: bytes, size: int) -> list[int]:
    """Where a group may begin."""
    return [match.start() for match in _GROUP.finditer(image, 0, size)]


def _unlisted(
    image: bytes, children: Children, size: int, begin: set[int], kept: set[str]
) -> Iterator[tuple[str, int]]:
    """Name and place of intact results that lie in the file and that it does not list any more."""
    found = dict[tuple[str, str], tuple[str, int]]()
    links, places = _links(image), [place for place in _groups(image, size) if place not in begin]
    known = {(name.partition("/")[0], name.rpartition("-")[2]) for name in kept}
    for place, about in children.each(lambda some: _examined(image, some, size), places):
        if about and not about[0]:
            _, probe, label, digest, _ = about
            names = links.get(digest.encode(), [])
            label = safe_label(label)
            name = label if not names or label in names else names[-1]
            digest = digest or format(place, "010x")
            if (probe, digest) not in known:
                found[probe, digest] = f"{probe}/{name}-{digest}", place
    yield from found.values()


def _links(image: bytes) -> dict[bytes, list[str]]:
    """The labels in the names of results in the file, by digest."""
    found = dict[bytes, list[str]]()
    for match in _LINK.finditer(image):
        start = image.rfind(b"\0", max(0, match.start() - _NAME), match.start()) + 1
        label = image[start : match.start()].decode(errors="replace")
        if start and label == safe_label(label):
            found.setdefault(match[1], []).append(label)
    return found

"""Open and check results files: reject what is damaged, of another format, or stored outside the file itself."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from landscape.options import printable
from landscape.results import handles
from landscape.results.declared_size import EXPANSION, SLACK, expanding, refuse_oversized
from landscape.results.handles import ENTRY, LIST, MOST_SCALES, Handle, ObjectID, OnDemand, attributes_of
from landscape.results.object_headers import Header, Image

FORMAT = 1
_PIECE = 1 << 24  # bytes of a file that are searched at a time
_HEADER = 16  # bytes of the header of a heap of texts
# What HDF5 and its readers raise on damaged bytes.
DAMAGE = (OSError, RuntimeError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, UnicodeError)

CHECK = "checksum"  # attribute of a result

_accepted: dict[Path, tuple[int, ...]] = {}  # files whose content was checked, as they were then

DEPTH = 3  # probe, result, quantity
MOST_LINKS = 200_000
MOST_ATTRIBUTES = 500  # of one group or dataset; a result has 30
_AXES = 32  # the most that HDF5 allows
_FEW = 2**13  # bytes of a heap: as many scales as fit into it are found in milliseconds


class Group(NamedTuple):
    """A group of a file, "" being the root, and its datasets by name."""

    path: str
    id: h5py.h5g.GroupID
    datasets: Mapping[str, Handle]
    members: Mapping[str, int]  # all its hard links, and where in the file they lead to
    header: Header | None = None


def checked_groups(file: h5py.File, path: Path, *, links: bool = False, on_demand: bool = False) -> Iterator[Group]:
    """Every group with its datasets, all of which may be read; the root first, then in alphabetical order.

    Files with external storage, virtual datasets, or arrays larger than the file can hold are rejected; with `links`
    those with soft and external links too: before writing, because one could redirect the write. With `on_demand` the
    arrays of a result are opened and checked when they are asked for.

    Raises:
        ValueError: names the first offender, before its group is returned.
    """
    size = path.stat().st_size
    count, image = 0, Image.of(file, size)
    limits = Limits(str(path), size, longest=longest_text([image.content] if image else _pieces(path), size))
    limits.add(h5py.h5g.open(file.id, b"/"))
    waiting: list[tuple[str, h5py.h5g.GroupID, int]] = [("", file.id, 1)]
    while waiting:
        where, group, depth = waiting.pop()
        members = _members(path, where, group, links=links)
        count += len(members)
        if count > MOST_LINKS:
            raise ValueError(f"{path} has more than {MOST_LINKS:,} groups and datasets; refused")
        opened = functools.partial(_opened, path, limits, where, group, image, members)
        header = image.header(h5py.h5o.get_info(group).addr) if image and depth == DEPTH else None
        if on_demand and depth == DEPTH:
            yield Group(where, group, OnDemand(members, functools.partial(_array, opened)), members, header)
            continue
        items = {name: opened(name) for name in members}
        arrays = {name: item for name, item in items.items() if isinstance(item, Handle)}
        yield Group(where, group, arrays, members, header)
        groups = ((f"{where}/{name}", item) for name, item in items.items() if isinstance(item, h5py.h5g.GroupID))
        waiting += reversed([(*found, depth + 1) for found in groups if depth < DEPTH])


def _members(path: Path, where: str, group: h5py.h5g.GroupID, *, links: bool) -> dict[str, int]:
    """Names of the hard links in a group, and where what they lead to lies in the file.

    Raises:
        ValueError: one cannot be shown, or, with `links`, is a link of another kind.
    """
    found = handles.links(group)
    for name, kind, _ in found:
        if not name.isprintable():
            raise ValueError(f"{path} holds a name that cannot be shown ({printable(name)}); refused")
        if links and kind != h5py.h5l.TYPE_HARD:
            raise ValueError(
                f"{path} holds a link instead of data ({where}/{name}), which may lead to another file; "
                "give another --out, or remove the link"
            )
    return {name: place for name, kind, place in found if kind == h5py.h5l.TYPE_HARD}


def _array(opened: Callable[[str], ObjectID | Handle], name: str) -> Handle:
    if isinstance(found := opened(name), Handle):
        return found
    raise ValueError(f"{name} is no array")


def _opened(
    path: Path,
    limits: Limits,
    where: str,
    group: h5py.h5g.GroupID,
    image: Image | None,
    at: Mapping[str, int],
    name: str,
) -> ObjectID | Handle:
    """What lies in a group under a name, counted; an array as its header says, where that suffices."""
    place, header = f"{where}/{name}", image.header(at[name]) if image else None
    if header is not None and header.dtype is not None:
        limits.add(handle := Handle(functools.partial(handles.opened, group, name), header), place)
        return handle
    item = handles.opened(group, name)
    if isinstance(item, h5py.h5d.DatasetID):
        limits.add(handle := Handle(item), place)
        return handle
    if isinstance(item, h5py.h5g.GroupID):
        limits.add(item, place)
        if h5py.h5o.get_info(item).rc > 1:
            raise ValueError(f"{path} holds the group {place} under several names; refused")
    return item


class Limits:
    """How much of a file, called `name`, may be read: `add` counts each object before it is read.

    Texts are counted one by one: all of an array may be one in the file, of a megabyte.
    """

    def __init__(self, name: str, size: int, *, longest: int) -> None:
        self._name, self._size, self._total, self._texts = name, size, 0, 0
        self._longest = longest  # bytes of a text

    def add(self, held: h5py.h5g.GroupID | Handle, where: str = "") -> None:
        """Count what a group or an array holds. Raises ValueError: it is too much, or its numbers lie elsewhere."""
        if (
            count := held.attributes_stored if isinstance(held, Handle) else h5py.h5a.get_num_attrs(held)
        ) > MOST_ATTRIBUTES:
            told = f"{count:,} attributes of {where or 'the file itself'}, expected at most {MOST_ATTRIBUTES}"
            raise ValueError(f"{self._name} has {told}; refused")
        if not self._few(count):
            for value in (held.attributes() if isinstance(held, Handle) else attributes_of(held)).values():
                self._more(len(value) if isinstance(value, str) else 0)
        if isinstance(held, Handle):
            if reason := "" if held.header else _unreadable(held.id):  # whose numbers lie in the file in one piece
                raise ValueError(f"{self._name} keeps the numbers of {where} in {reason}; refused")
            self._check_scales(held, where)
            count = 0 if held.shape is None else math.prod(held.shape)
            self._more(held.dtype.itemsize * count)
            if count and held.dtype.hasobject and not self._few(count):
                self._add_texts(h5py.Dataset(held.id))

    def _few(self, count: int) -> bool:
        """Whether so many more texts cannot be too much, however long they are; they are counted then."""
        if few := self._texts + count * self._longest <= EXPANSION * self._size + SLACK:
            self._texts += count * self._longest
        return few

    def _check_scales(self, held: Handle, where: str) -> None:
        """Refuse lists of scales without end, all of which may be one in the file."""
        if (size := held.stored_size(LIST)) is None:
            return
        axes = len(held.shape or ())
        if size != ENTRY * axes or axes > _AXES:
            raise ValueError(f"{self._name} has scales of more axes than {where} has; refused")
        if self._longest > _FEW and (
            many := [n for axis in range(axes) if (n := h5py.h5ds.get_num_scales(held.id, axis)) > MOST_SCALES]
        ):
            raise ValueError(
                f"{self._name} has {many[0]:,} scales of an axis of {where}, expected at most {MOST_SCALES}; refused"
            )

    def _more(self, count: int) -> None:
        self._total += count
        refuse_oversized(self._name, "arrays", self._total, self._size, expansion=EXPANSION, slack=SLACK)

    def _add_texts(self, dataset: h5py.Dataset) -> None:
        rows, step = dataset.shape[:-1], max(1, SLACK // self._longest)
        for row in np.ndindex(rows):
            for start in range(0, dataset.shape[-1] if dataset.shape else 1, step):
                part = dataset[(*row, slice(start, start + step))] if dataset.shape else [dataset[()]]
                self._more(sum(map(len, part)))


def longest_text(pieces: Iterable[bytes], size: int) -> int:
    """A bound on the bytes of a text in a file of that size: the largest of the heaps in which HDF5 keeps them.

    `pieces` are the file's content, each with the last bytes of the one before, so that no header is cut.
    """
    longest = 1
    for piece in pieces:
        for heap in re.finditer(b"GCOL", piece):
            longest = max(longest, int.from_bytes(piece[heap.end() + 4 : heap.end() + 12], "little"))
    return min(size, longest)


def _pieces(path: Path) -> Iterator[bytes]:
    """The content of a file in pieces of some MB: a file may be larger than the memory that a process may have."""
    with path.open("rb") as stream:
        last = b""
        while piece := stream.read(_PIECE):
            yield last + piece
            last = piece[-_HEADER:]


def _unreadable(dataset: h5py.h5d.DatasetID) -> str:
    """Where the numbers of a dataset lie, in words, if they must not be read; "" if they may."""
    if dataset.get_offset() is not None:  # in the file, in one piece
        return ""
    created = dataset.get_create_plist()
    if created.get_layout() == h5py.h5d.VIRTUAL or created.get_external_count():
        return "another file"
    return expanding(dataset)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[h5py.File]:
    """The file open for reading, even while others have it open.

    It is opened as a stream, because HDF5 would take a lock, or refuse a file that this process has open with other
    flags (as a lazy `xr.open_dataset` in a notebook does).
    """
    with path.open("rb") as stream, h5py.File(stream, "r") as file:
        yield file


def check(path: Path, *, writable: bool = False, content: bool = True) -> None:
    """Reject a file that cannot be used; without `content`, it is left to `checked_groups` whether its arrays can.

    Raises:
        FileNotFoundError, ValueError, PermissionError: see the message.
    """
    if not path.exists():
        if not writable:
            raise FileNotFoundError(f"no results file at {path}; run a probe first, for example: landscape surface")
        return
    if path.is_dir():
        give = f"--out {path / 'results.h5'}" if writable else "the results file in it"
        raise ValueError(f"{path} is a folder, expected an HDF5 results file; give {give}")
    if _accepted.get(path.absolute(), ()) == state_of(path):
        _require_permission(path, writable)
        return
    if not h5py.is_hdf5(path):
        what = "another --out, or move it away" if writable else "a file that a probe wrote"
        raise ValueError(f"{path} is not an HDF5 file; give {what}")
    with naming_damage(path), reading(path) as file:
        version = file.attrs.get("format")
        if content:
            collections.deque(checked_groups(file, path, links=writable), maxlen=0)
    if not isinstance(version, int | np.integer):
        what = "give another --out" if writable else f"if it is a surface of another tool: landscape import {path}"
        raise ValueError(f"{path} is not a results file of landscape (no attribute format); {what}")
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads format {FORMAT}; update landscape")
    _require_permission(path, writable)
    if writable and content:
        accept(path)


def accept(path: Path) -> None:
    """Skip the checks of a file's content, which take long where it holds many results, until it changes."""
    _accepted[path.absolute()] = state_of(path)


def state_of(path: Path) -> tuple[int, ...]:
    """What changes whenever somebody writes or replaces the file; empty if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _require_permission(path: Path, writable: bool) -> None:
    if writable and not path.stat().st_mode & 0o222:
        raise PermissionError(f"{path} is read-only; make it writable (chmod u+w), or give another --out")


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Give what HDF5 raises on damaged bytes one line that names the file, as `damaged`."""
    try:
        yield
    except DAMAGE as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: BaseException) -> ValueError:
    """The one-line error for a damaged file."""
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return ValueError(f"{path} is damaged ({reason}); save what is intact with: landscape repair {path}")

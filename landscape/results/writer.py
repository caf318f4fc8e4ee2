"""Write results so that a kill loses nothing: a journal per running result, merged into the file by atomic replacement.

The HDF5 file is never written in place. A copy is extended and replaces it, so that readers always see a complete file.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import io
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import h5py
import numpy as np

from landscape.probe import Plan, Unit, Values
from landscape.results import group as groups
from landscape.results.group import read_group
from landscape.results.hdf5_file import FORMAT, accept, check
from landscape.results.journal import Busy, Journal, Record
from landscape.results.run_key import Arrays, ReduceOf, RunKey, from_header, to_header

if TYPE_CHECKING:
    import xarray as xr


class Writer:
    """The only writer of one result: takes finished units, survives kills, merges; a context manager.

    `reduce_of` gives the `reduce` of a stored group from its probe name and parameters, for the summaries.

    Raises:
        Busy: another process is measuring the same result.
        ValueError: the file is not a results file, or is of a newer format.
        PermissionError: it is read-only.
    """

    def __init__(self, path: Path, key: RunKey, *, reduce_of: ReduceOf = lambda probe, parameters: None) -> None:
        check(path, writable=True)
        self.path, self.key, self._reduce_of = path, key, reduce_of
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path):
            self._journal = _journal(path, key)
        try:
            self.merge()  # what a killed run had finished; also fails early on a file that cannot be written
        except BaseException:
            self._journal.__exit__(None, None, None)
            raise

    def pending(self) -> list[Unit]:
        """Units not yet done, in order."""
        done, shape = read_group(self.path, self.group)["done"], self.key.plan.shape
        if done.shape != shape:
            raise ValueError(
                f"{self.group} in {self.path} has {done.shape} units, expected {shape}; "
                "give --overwrite, or another --out"
            )
        return [unit for unit in self.key.plan.units() if not done[unit.index]]

    def arrays(self) -> Arrays:
        """All arrays of the result in the file, by name."""
        return read_group(self.path, self.group)

    def result(self) -> xr.Dataset | None:
        """None: the result is read from the file, once its last units are merged."""
        return None

    def write(self, unit: Unit, values: Values) -> None:
        """Append one finished unit to the journal."""
        self._journal.append(record_of(self.key, unit, values))

    def merge(self) -> None:
        """Move everything finished so far from the journal into the file, with summaries."""
        with _lock(self.path), contextlib.ExitStack() as orphans:
            with _replacement(self.path) as file:
                group = groups.open_or_create(file, self.key)
                self.group = group.name.strip("/")
                groups.merge(group, self._journal.records(), self._reduce_of)
                adopted = [orphans.enter_context(journal) for journal in _orphans(self.path)]
                for journal in adopted:
                    _adopt(file, journal, self._reduce_of)
            for journal in adopted:  # only now are their units safe in the file
                journal.remove()
        self._journal.clear()
        self._journal.append(to_header(self.key))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, OSError):
                self.merge()  # also after an interrupt: finished units are kept
                self._journal.remove()
        finally:
            self._journal.__exit__(kind, error, trace)


def record_of(key: RunKey, unit: Unit, values: Values) -> Record:
    """A finished unit as a record, in the dtypes of the plan.

    Raises:
        ValueError: its values are not those that the plan promises.
    """
    wanted = key.plan.quantities
    if set(values) != set(wanted):
        raise ValueError(f"{key.probe} measured {sorted(values)}, its plan promises {sorted(wanted)}")
    return Record({"index": list(unit.index)}, {name: np.asarray(values[name], wanted[name].dtype) for name in wanted})


def discard(path: Path, key: RunKey) -> None:
    """Remove a stored result (`--overwrite`).

    Raises:
        Busy: another process is measuring it.
        ValueError, PermissionError: as `check`.
    """
    check(path, writable=True)
    if not path.parent.exists():
        return
    with _lock(path), _journal(path, key) as journal:
        if path.exists():
            with _replacement(path) as file:
                if (name := groups.name_with_digest(file, key.probe, key.digest)) is not None:
                    del file[name]
        journal.remove()


def merge_orphans(path: Path, *, reduce_of: ReduceOf) -> None:
    """Merge the journals of killed processes, so that the file says how far each result got."""
    check(path, writable=True)
    if not any(path.parent.glob(_journals(path))):
        return
    with _lock(path), contextlib.ExitStack() as orphans:
        adopted = [orphans.enter_context(journal) for journal in _orphans(path)]
        if adopted:
            with _replacement(path) as file:
                for journal in adopted:
                    _adopt(file, journal, reduce_of)
        for journal in adopted:
            journal.remove()


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[h5py.File]:
    """A writable copy of the file that replaces it if the block succeeds; call it under the file's lock."""
    check(path, writable=True)
    # In memory: HDF5 cannot close a file on a full disk, and complains on stderr from its destructor.
    content = io.BytesIO(path.read_bytes() if path.exists() else b"")
    with h5py.File(content, "r+" if path.exists() else "w") as file:
        file.attrs["format"] = FORMAT
        yield file
    temporary = path.with_name(f".{path.name}.merging")  # one name: what a kill leaves behind, the next merge replaces
    try:
        with temporary.open("wb") as stream:
            stream.write(content.getbuffer())
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        temporary.replace(path)
        accept(path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; what was finished is kept in its journal") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Mutual exclusion of merges, by a lock file that is removed afterwards.

    While it is held, a locked journal belongs to a living writer, never to a merge that is adopting it.
    """
    name = path.with_name(f"{path.name}.lock")
    while True:
        handle = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(name)):
                break
        os.close(handle)
    try:
        yield
    finally:
        name.unlink(missing_ok=True)
        os.close(handle)


def _journal(path: Path, key: RunKey) -> Journal:
    try:
        return Journal(path.with_name(f"{path.name}.journal-{key.digest}"))
    except Busy:
        raise Busy(
            f"this result ({key.probe}, {key.label}) is being measured into {path} by another process; "
            "wait for it, or give another --out"
        ) from None


def _journals(path: Path) -> str:
    return f"{glob.escape(path.name)}.journal-*"


def _orphans(path: Path) -> Iterator[Journal]:
    """Journals beside the file whose writers are gone, locked; those of living writers are skipped."""
    for name in sorted(path.parent.glob(_journals(path))):
        with contextlib.suppress(Busy):
            yield Journal(name)


def _adopt(file: h5py.File, journal: Journal, reduce_of: ReduceOf) -> None:
    records = journal.records()
    try:
        header = next(records, None)
        if header is not None:
            key = from_header(header)
            _check_size(key.plan)
            groups.merge(groups.open_or_create(file, key), records, reduce_of)
    except (LookupError, TypeError, ValueError, RuntimeError, MemoryError, struct.error) as error:
        raise ValueError(
            f"{journal.path} is not a readable journal ({type(error).__name__}: {error}); move it away"
        ) from error


def _check_size(plan: Plan) -> None:
    """Reject a journal whose arrays would not fit into memory."""
    dims = [(*plan.over, *quantity.dims) for quantity in plan.quantities.values()]
    dims += [quantity.dims for quantity in plan.summaries.values()]
    sizes = [math.prod(len(plan.axis(name)) for name in names) for names in dims]
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    if 8 * sum(sizes) > room:
        raise ValueError(f"it declares {8 * sum(sizes):,} bytes, more than half of this machine's memory")

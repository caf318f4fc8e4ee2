"""Write results so that a kill loses nothing: a journal per running result, merged into the file by atomic replacement.

The HDF5 file is never written in place. A copy is extended and replaces it, so that readers always see a complete file.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import h5py
import numpy as np
import xarray as xr

from landscape.probe import MICRO_BATCHES, Unit, Values
from landscape.results import creation
from landscape.results import group as groups
from landscape.results import unmerged_journals as orphans
from landscape.results.group import read_group
from landscape.results.hdf5_file import DAMAGE, check
from landscape.results.journal import Busy, Journal, Record
from landscape.results.reader import dataset_of
from landscape.results.replacing import behind_link
from landscape.results.run_key import Arrays, ReduceOf, RunKey, to_header
from landscape.results.updating import ATTEMPTS, locked, update

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Writer(contextlib.AbstractContextManager["Writer"]):
    """The only writer of one result: takes finished units, survives kills, merges; a context manager.

    `reduce_of` gives the `reduce` of a stored group from its probe name and parameters, for the summaries.

    Raises:
        Busy: another process is measuring the same result.
        ValueError: the file is not a results file, or is of another format.
        PermissionError: it is read-only.
    """

    def __init__(
        self, path: Path, key: RunKey, *, reduce_of: ReduceOf = lambda probe, parameters: None, sync: bool = False
    ) -> None:
        self.path = path = behind_link(path)
        check(path, writable=True)
        self.key, self._reduce_of = key, reduce_of
        self._micro_batches = 1
        self._known: Arrays | None = None  # as the file held them when this writer last merged
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            self._journal = _journal(path, key, sync=sync)
        try:
            self.merge()  # what a killed run had finished; also fails early on a file that cannot be written
        except BaseException:
            self._journal.__exit__()
            raise
        if (stored := groups.attribute(path, self.group, "label")) != key.label:
            _log.info("note: %s has the same weights as %s, whose result this is", key.label, stored)

    def pending(self) -> list[Unit]:
        """Units not yet done, in order. Raises ValueError: the result in the file has other units."""
        done, shape = self._merged["done"], self.key.plan.shape
        if done.shape != shape:
            raise ValueError(
                f"{self.group} in {self.path} has {done.shape} units, expected {shape}; "
                "give --overwrite, or another --out"
            )
        return [unit for unit in self.key.plan.units() if not done[unit.index]]

    def arrays(self) -> Arrays:
        try:
            return read_group(self.path, self.group)
        except (ValueError, *DAMAGE):  # somebody replaced the file
            self.merge()
            return read_group(self.path, self.group)

    def result(self) -> xr.Dataset | None:
        """None: the result is read from the file, once its last units are merged."""
        return None

    def write(self, unit: Unit, values: Values) -> None:
        self._journal.append(record_of(self.key, unit, values))

    def merge(self) -> None:
        """Move everything finished so far from the journal into the file, with summaries.

        Finished units that the file has lost since the last merge, because somebody deleted or replaced it, are written
        again; where a file that is no results file took its place, they are kept in the journal.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path))
            except OSError as error:
                kept = f"; what was finished is kept in {self._journal.path.name}" if self._known is not None else ""
                raise OSError(f"{error}{kept}") from error
            found = [stack.enter_context(journal) for journal in orphans.orphans(self.path)]

            def change(file: h5py.File) -> tuple[int, list[str]]:
                return self._merge_into(file), [orphans.adopt(file, journal, self._reduce_of) for journal in found]

            try:
                again, reasons = self._changed(change)
            except ValueError as error:
                if self._known is None:
                    raise
                self._keep_known(self._known)
                raise ValueError(f"{error}; what was measured is kept in {self._journal.path.name}") from error
            orphans.remove(found, reasons)
        if again:
            _log.warning("warning: %s was deleted or replaced; its %d units are written again", self.path, again)
        if self._journal.unreadable:
            orphans.set_aside(self._journal)
        if self._known is None:
            self._journal.clear()
            self._journal.append(to_header(self.key))
        else:
            self._journal.clear(keep=1)
        self._known = self._merged

    def _changed(self, change: Callable[[h5py.File], T]) -> T:
        """What a change of the file returns, once the file that holds the units was read back."""
        for _ in range(ATTEMPTS):
            result = update(self.path, change)
            with contextlib.suppress(ValueError, *DAMAGE):
                if np.array_equal(groups.read_array(self.path, self.group, "done"), self._merged["done"]):
                    return result
        raise ValueError(f"{self.path}: other programs keep replacing it")

    def _merge_into(self, file: h5py.File) -> int:
        """Merge what is finished into a copy of the file; returns how many units of earlier merges it had lost."""
        group = groups.open_or_create(file, self.key)
        self.group = group.name.strip("/")
        again = groups.merge(group, self._journal.records(), self._reduce_of, known=self._known)
        self._micro_batches = groups.note_micro_batches(group, self._micro_batches)
        self._merged = {name: group[name][()] for name in (*self.key.plan.quantities, "done") if name in group}
        return again

    def _keep_known(self, known: Arrays) -> None:
        """Put what was merged back into the journal: the file is no results file any more."""
        held = {tuple(record.data["index"]) for record in self._journal.records() if "index" in record.data}
        for index in map(tuple, np.argwhere(known["done"] == 1).tolist()):
            if index not in held:
                values = {name: array[index] for name, array in known.items() if name != "done"}
                self._journal.append(Record({"index": list(index)}, values))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, OSError):
                self.merge()  # also after an interrupt: finished units are kept
                self._journal.remove()
            refused = kind is not None and issubclass(kind, ValueError)
            if refused and not groups.read_array(self.path, self.group, "done").any():
                with locked(self.path):
                    update(self.path, partial(_delete, key=self.key))  # a question that was refused has no result
        finally:
            self._journal.__exit__()


def record_of(key: RunKey, unit: Unit, values: Values) -> Record:
    """A finished unit as a record, in the dtypes of the plan.

    Raises:
        ValueError: its values are not those that the plan promises.
    """
    wanted = key.plan.quantities
    data: dict[str, Any] = {"index": list(unit.index)}
    if MICRO_BATCHES in values:
        data[MICRO_BATCHES] = int(values[MICRO_BATCHES])
    if set(values) - {MICRO_BATCHES} != set(wanted):
        raise ValueError(f"{key.probe} measured {sorted(values)}, its plan promises {sorted(wanted)}")
    arrays = {name: np.asarray(values[name], wanted[name].dtype) for name in wanted}
    for name, array in arrays.items():
        shape = tuple(len(key.plan.axis(axis)) for axis in wanted[name].dims)
        if array.shape not in ((), shape):
            raise ValueError(f"{key.probe} measured {name} of shape {array.shape}, its plan promises {shape}")
    return Record(data, arrays)


def discard(path: Path, key: RunKey) -> None:
    """Remove a stored result (`--overwrite`).

    Raises:
        Busy: another process is measuring it.
        ValueError, PermissionError: as `check`.
    """
    path = behind_link(path)
    check(path, writable=True)
    if not path.parent.exists():
        return

    with locked(path), _journal(path, key) as journal:
        if path.exists():
            update(path, partial(_delete, key=key))
        journal.remove()


def _delete(file: h5py.File, key: RunKey) -> None:
    if (name := groups.name_with_digest(file, key.probe, key.digest)) is not None:
        del file[name]


def _journal(path: Path, key: RunKey, *, sync: bool = False) -> Journal:
    """The journal of a result; what another result left under its name is set aside."""
    try:
        journal = Journal(path.with_name(f"{path.name}.journal-{key.digest}"), sync=sync)
    except Busy:
        raise Busy(
            f"this result ({key.probe}, {key.label}) is being measured into {path} by another process; "
            "wait for it, or give another --out"
        ) from None
    try:
        records = list(journal.records())
        if any("key" in record.data for record in records):
            own = orphans.key_of(records, journal.path)
            if own.probe != key.probe:
                raise ValueError(f"it belongs to {own.probe} {own.digest}")
        orphans.require_fitting(records, key.plan)
    except orphans.UNREADABLE as error:
        orphans.set_aside(journal, str(error))
    return journal


class MemoryWriter(contextlib.AbstractContextManager["MemoryWriter"]):
    """Takes the finished units of one result like `Writer`; a context manager, after which the result is gone.

    It is the same as in a results file to the last attribute.
    """

    def __init__(self, key: RunKey, *, reduce_of: ReduceOf) -> None:
        self.key, self._reduce_of = key, reduce_of
        self._records: list[Record] = []
        self._group = creation.in_memory(key)
        self.group = self._group.name

    def pending(self) -> list[Unit]:
        """All units: nothing was measured before."""
        return list(self.key.plan.units())

    def arrays(self) -> Arrays:
        return groups.arrays(self._group)

    def write(self, unit: Unit, values: Values) -> None:
        self._records.append(record_of(self.key, unit, values))

    def merge(self) -> None:
        """Store the units taken so far, with summaries."""
        groups.merge(self._group, iter(self._records), self._reduce_of)
        self._records.clear()

    def result(self) -> xr.Dataset:
        self.merge()
        return dataset_of(self._group)

    def __exit__(self, *error: object) -> None: ...

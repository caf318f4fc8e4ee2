"""Hold one result in memory: what `writer.Writer` keeps in a file, for a caller who wants the numbers alone."""

import uuid
from types import TracebackType
from typing import Self

import h5py
import xarray as xr

from landscape.probe import Unit, Values
from landscape.results import group as groups
from landscape.results.journal import Record
from landscape.results.reader import dataset_of
from landscape.results.run_key import Arrays, ReduceOf, RunKey
from landscape.results.writer import record_of


class MemoryWriter:
    """Takes the finished units of one result like `Writer`; a context manager, after which the result is gone.

    The group lies in an HDF5 file in memory, so that it is the same as in a results file to the last attribute.
    """

    def __init__(self, key: RunKey, *, reduce_of: ReduceOf) -> None:
        self.key, self._reduce_of = key, reduce_of
        self._records: list[Record] = []
        self._file = h5py.File(f"{uuid.uuid4()}", "w", driver="core", backing_store=False)
        self._group = groups.open_or_create(self._file, key)
        self.group = self._group.name.strip("/")

    def pending(self) -> list[Unit]:
        """All units: nothing was measured before."""
        return list(self.key.plan.units())

    def arrays(self) -> Arrays:
        """All arrays of the result so far, by name."""
        return groups.arrays(self._group)

    def write(self, unit: Unit, values: Values) -> None:
        """Take one finished unit."""
        self._records.append(record_of(self.key, unit, values))

    def merge(self) -> None:
        """Store the units taken so far, with summaries."""
        groups.merge(self._group, iter(self._records), self._reduce_of)
        self._records.clear()

    def result(self) -> xr.Dataset:
        """The labelled dataset, as `reader.result` gives it."""
        self.merge()
        return dataset_of(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

"""Write a series: a result whose one axis grows while it is measured, such as the steps of a training run.

Rows have whole numbers as coordinates, in ascending order. Each goes through the journal like any unit, so that a kill
loses none. A run that goes on from an earlier step, because that of its checkpoint is earlier than the last row, drops
the rows after that step first: every coordinate is there once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from landscape.probe import Values
from landscape.results import group as groups
from landscape.results import hdf5_file, journal, replacing, run_key, updating

AT, AFTER = "at", "after"  # words of a record: the coordinate of its row; or the last coordinate that is kept
WORDS = (AT, AFTER)
Rows = dict[int, Mapping[str, np.ndarray]]


class SeriesWriter:
    """The only writer of one series; it holds all rows, which are few, and writes them again if the file loses them.

    Args:
        path: results file, made if absent.
        key: whose plan `grows`; its one unit axis is that of the rows.
        after: rows with a larger coordinate are dropped; None keeps all.

    Raises:
        Busy: another process is writing the same series.
        ValueError, OSError: the file cannot be used; see the message.
    """

    def __init__(self, path: Path, key: run_key.RunKey, *, after: int | None = None) -> None:
        self.path = replacing.behind_link(path)
        self.key = key
        hdf5_file.check(self.path, writable=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with updating.locked(self.path):
            try:
                self._journal = journal.Journal(self.path.with_name(f"{self.path.name}.journal-{key.digest}"))
            except journal.Busy:
                raise journal.Busy(
                    f"the series {key.label} is being written into {path} by another process or monitor; close that "
                    "one, or give this run another label, or another file"
                ) from None
        try:
            self._rows = rows_of(stored_series(self.path, key), self._journal.records())
            self._journal.clear()
            self._journal.append(run_key.to_header(key))
            if after is not None:
                self._rows = {at: row for at, row in self._rows.items() if at <= after}
                self._journal.append(journal.Record({AFTER: after}, {}))
            self.merge()
        except BaseException:
            self.release()
            raise

    def write(self, at: int, values: Values) -> None:
        """Add a row, or replace the one with its coordinate; when this returns, a kill cannot lose it.

        Raises:
            ValueError: the values are not those that the plan promises.
            OSError: the disk is full.
        """
        wanted = self.key.plan.quantities
        if set(values) != set(wanted):
            raise ValueError(f"{self.key.probe} measured {sorted(values)}, its plan promises {sorted(wanted)}")
        row = {name: np.asarray(values[name], quantity.dtype) for name, quantity in wanted.items()}
        self._journal.append(journal.Record({AT: at}, row))
        self._rows[at] = row

    def merge(self, *, finished: bool = False) -> None:
        """Move all rows into the file.

        Raises:
            ValueError, OSError: the file cannot be written; the journal keeps the rows.
        """

        def change(file: h5py.File) -> str:
            group = _stored(file, self.key, self._rows)
            if finished:
                groups.mark_finished(group)
            return str(group.name).strip("/")

        with updating.locked(self.path):
            self.group = updating.update(self.path, change)
        self._journal.clear(keep=1)

    def close(self) -> None:
        """Move all rows into the file, which says that the series is finished, and let the journal go."""
        try:
            self.merge(finished=True)
            self._journal.remove()
        finally:
            self.release()

    def release(self) -> None:
        self._journal.__exit__()


def adopt(file: h5py.File, key: run_key.RunKey, records: Iterable[journal.Record]) -> None:
    """Merge the journal of a series whose process was killed."""
    name = groups.name_with_digest(file, key.probe, key.digest)
    stored = groups.arrays(file[name]) if name is not None else {}
    if name is not None and not {*key.plan.over, *key.plan.quantities} <= stored.keys():
        raise ValueError(f"the result {name} is not the series that it declares")
    _stored(file, key, rows_of(_rows_in(stored, key), records))


def stored_series(path: Path, key: run_key.RunKey) -> Rows:
    """The rows of a series that a file holds; none where there is no such series."""
    name = groups.stored_group(path, key.probe, key.digest)
    return {} if name is None else _rows_in(groups.read_group(path, name), key)


def rows_of(rows: Rows, records: Iterable[journal.Record]) -> Rows:
    """Rows with what the records of a journal changed about them, in its order."""
    rows = dict(rows)
    for record in records:
        if AFTER in record.data:
            rows = {at: row for at, row in rows.items() if at <= record.data[AFTER]}
        elif AT in record.data:
            rows[int(record.data[AT])] = record.arrays
    return rows


def _rows_in(stored: run_key.Arrays, key: run_key.RunKey) -> Rows:
    (axis,) = key.plan.over
    rows = enumerate(stored.get(axis, ()))
    return {int(at): {name: stored[name][i] for name in key.plan.quantities} for i, at in rows}


def _stored(file: h5py.File, key: run_key.RunKey, rows: Rows) -> h5py.Group:
    """The group of a series with exactly these rows."""
    (axis,) = key.plan.over
    name = groups.name_with_digest(file, key.probe, key.digest)
    created = None
    if name is not None and not _extensible(file[name], key):  # a copy by another command
        created = file[name].attrs.get("created")
        del file[name]
    empty = replace(key.plan, over={axis: np.array([], np.int64)})
    group = groups.open_or_create(file, replace(key, plan=empty))
    if created is not None:
        group.attrs["created"] = created
    coordinates = np.array(sorted(rows), np.int64)
    columns: run_key.Arrays = {
        quantity: np.array([rows[at][quantity] for at in coordinates.tolist()], group[quantity].dtype)
        for quantity in key.plan.quantities
    }
    columns |= {axis: coordinates, "done": np.ones(len(rows), np.uint8)}
    for quantity, values in columns.items():
        group[quantity].resize(len(rows), axis=0)
        group[quantity][...] = values.reshape(group[quantity].shape)
    groups.note_counts(group)
    if group.attrs["finished"]:  # every new text takes 4 KiB of the file
        group.attrs["finished"] = ""
    groups.seal(group)
    return group


def _extensible(group: h5py.Group, key: run_key.RunKey) -> bool:
    return all(
        name in group and group[name].maxshape[:1] == (None,) for name in (*key.plan.over, *key.plan.quantities, "done")
    )

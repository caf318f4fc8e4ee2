"""Merge results files, such as the shards of a job array: the union of their results and of the units of each."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from landscape.options import counted
from landscape.probe import MICRO_BATCHES
from landscape.results import group as groups
from landscape.results import handles, malformed, unmerged_journals, updating
from landscape.results.hdf5_file import Group, check, checked_groups, naming_damage, reading
from landscape.results.replacing import behind_link
from landscape.results.run_key import Arrays, ReduceOf

SHOWN = 3  # conflicts in an error message
_log = logging.getLogger(__name__)


class ConflictError(ValueError):
    """Two files hold different values for one unit."""


@dataclass(frozen=True)
class Merged:
    """A result of the merged file: its units, how many are finished, and from how many files they come."""

    group: str
    units: int
    done: int
    files: int


def merge_files(sources: Sequence[Path], out: Path, *, reduce_of: ReduceOf, prefer: Path | None = None) -> list[Merged]:
    """Write the union of several results files, in one replacement; `out` may exist, or be one of them.

    Results with the same probe and digest, which ask the same question, become one; units that several files hold must
    be equal, to the last bit, unless the values of the file `prefer` are to be taken. Journals that killed processes
    left beside the files are merged first. Results of unknown probes are copied as they are.

    Raises:
        ConflictError: values differ, or two results of one digest have other axes; nothing is written.
        FileNotFoundError, ValueError, OSError: a file cannot be used; see the message.
    """
    sources, out = list(dict.fromkeys(behind_link(path).absolute() for path in sources)), behind_link(out).absolute()
    first = None if prefer is None else behind_link(prefer).absolute()
    if first is not None and first not in (*sources, out):
        raise ValueError(f"--prefer {prefer} is none of the files to merge ({', '.join(p.name for p in sources)})")
    for path in dict.fromkeys((*sources, out)):
        if unmerged_journals.journals(path):
            unmerged_journals.merge_orphans(path, reduce_of=reduce_of)
            for living in unmerged_journals.journals(path):
                _log.warning("note: %s is being measured; its units of the last minute are left out", living.name)
        check(path, writable=path == out, content=path == out)  # `checked_groups` checks the others while it reads
    others = sorted((path for path in sources if path != out), key=lambda path: path != first)

    def change(file: h5py.File) -> list[Merged]:
        union = _Union(file, [out, *others], first, reduce_of)
        for number, path in enumerate(others, start=1):
            with naming_damage(path), reading(path) as content:
                for group in checked_groups(content, path):
                    if group.path.count("/") == 2 and h5py.h5a.exists(group.id, b"probe"):
                        with malformed.readable(path, group.path.strip("/")):
                            union.add(group, number)
        return union.finish()

    return updating.change_file(out, change)


@dataclass
class _Result:
    """A result while it is merged: its arrays, and for every unit the number of the file it comes from, or -1."""

    name: str
    arrays: Arrays
    origin: np.ndarray
    files: set[int]
    axes: list[str]  # names of the arrays that are axes
    measured: list[str]  # and of those that hold one entry per unit
    changed: bool = False
    micro_batches: int = 1


class _Union:
    """The results of the files added so far; `finish` stores what changed."""

    def __init__(self, file: h5py.File, paths: Sequence[Path], first: Path | None, reduce_of: ReduceOf) -> None:
        self._file, self._paths, self._reduce_of = file, paths, reduce_of
        self._preferred = paths.index(first) if first in paths else None
        self._conflicts: list[str] = []
        self._results: dict[tuple[str, str], _Result] = {}
        for name, group in groups.results_in(file):
            self._hold(name, group, 0)

    def add(self, group: Group, number: int) -> None:
        """Add one result of a file, which is given by its number."""
        name = group.path.strip("/")
        known = self._results.get(_key(name))
        if known is None:
            self._hold(name, groups.copy(h5py.Group(group.id), self._file, name), number)
        else:
            self._join(known, group.datasets, number)
            if h5py.h5a.exists(group.id, MICRO_BATCHES.encode()):
                known.micro_batches = max(known.micro_batches, int(h5py.Group(group.id).attrs[MICRO_BATCHES]))

    def finish(self) -> list[Merged]:
        """Store what changed, with summaries; raises ConflictError where values differ."""
        if self._conflicts:
            hidden = len(self._conflicts) - SHOWN
            more = f"; {counted(hidden, 'more result')} with other values" if hidden > 0 else ""
            raise ConflictError(
                f"{'; '.join(self._conflicts[:SHOWN])}{more}; nothing was written. --prefer FILE takes the values of "
                "one of the files"
            )
        for result in self._results.values():
            if result.changed:
                group = self._file[result.name]
                for name in (*result.measured, "done"):
                    group[name][...] = result.arrays[name]
                groups.note_micro_batches(group, result.micro_batches)
                with malformed.readable(self._paths[0], result.name):
                    groups.summarise(group, self._reduce_of)
        return [
            Merged(result.name, result.origin.size, int((result.origin >= 0).sum()), len(result.files))
            for result in sorted(self._results.values(), key=lambda result: result.name)
        ]

    def _hold(self, name: str, group: h5py.Group, number: int) -> None:
        arrays = groups.arrays(group)
        done = arrays["done"] == 1 if "done" in arrays else np.ones((), bool)
        axes, measured = _roles(group)
        self._results[_key(name)] = _Result(name, arrays, np.where(done, number, -1), {number}, axes, measured)

    def _join(self, known: _Result, datasets: Mapping[str, handles.Handle], number: int) -> None:
        if reason := _mismatch(known, datasets):
            self._conflicts.append(f"{known.name} in {self._paths[number].name} {reason}")
            return
        if "done" not in datasets:
            return
        finished = datasets["done"].array()
        done = finished == 1
        if not done.any():
            return
        known.files.add(number)
        arrays = {**{name: datasets[name].array() for name in known.measured}, "done": finished}
        taken, both = done & (known.origin < 0), done & (known.origin >= 0)
        if both.any():
            replaced = self._replaced(known, arrays, both, number)
            if replaced is None:
                return
            taken |= replaced
        if taken.any():
            units = np.nonzero(taken)
            for name, values in arrays.items():
                known.arrays[name][units] = values[units]
            known.origin[units] = number
            known.changed = True

    def _replaced(self, known: _Result, arrays: Arrays, both: np.ndarray, number: int) -> np.ndarray | None:
        """Which of the units that are in both files take the values of this one; None after a conflict."""
        differ = {name: _unequal(known.arrays[name], arrays[name], both.ndim) & both for name in known.measured}
        if any(mask.any() for mask in differ.values()):  # what is computed from the units may differ
            computed = self._summaries(known, arrays)
            differ = {name: mask for name, mask in differ.items() if name not in computed}
        conflict: np.ndarray = np.logical_or.reduce([np.zeros(both.shape, bool), *differ.values()])
        if number == self._preferred:
            return conflict
        unresolved = conflict if self._preferred is None else conflict & (known.origin != self._preferred)
        if unresolved.any():
            self._conflicts.append(self._described(known, arrays, differ, unresolved, number))
            return None
        return np.zeros_like(conflict)

    def _summaries(self, known: _Result, arrays: Arrays) -> set[str]:
        """The arrays that are computed from the units of both."""
        about = self._file[known.name].attrs
        reduce = self._reduce_of(str(about["probe"]), json.loads(about.get("parameters", "{}")))
        if reduce is None:
            return set()
        joint, fresh = {**known.arrays}, known.origin < 0
        for name, values in arrays.items():
            joint[name] = known.arrays[name].copy()
            joint[name][fresh] = values[fresh]
        return set(reduce(joint))

    def _described(
        self, known: _Result, arrays: Arrays, differ: Mapping[str, np.ndarray], where: np.ndarray, number: int
    ) -> str:
        index = tuple(np.argwhere(where)[0].tolist())
        name = next(name for name, mask in differ.items() if mask[index])
        mine, theirs = (np.ravel(values[name][index])[:1] for values in (known.arrays, arrays))
        files = self._paths[known.origin[index]].name, self._paths[number].name
        first = f"{name} at {index} is {mine[0]!s} in {files[0]} and {theirs[0]!s} in {files[1]}"
        return f"{known.name}: {counted(int(where.sum()), 'unit', ',')} with other values, {first}"


def _mismatch(known: _Result, datasets: Mapping[str, handles.Handle]) -> str:
    """Why a result of the same digest cannot be joined: other axes or other quantities; "" if it can."""
    for name in known.axes:
        if name in datasets and not np.array_equal(known.arrays[name], datasets[name].array()):
            return f"has another axis {name}, so that it is not the same question"
    lacking = [name for name in (*known.measured, "done") if name not in datasets and name in known.arrays]
    if lacking:
        return f"has no {', '.join(lacking)}"
    stored = [name for name in (*known.measured, "done") if name in known.arrays]
    shaped = ("done" in datasets) == ("done" in known.arrays)
    if not shaped or any(datasets[name].shape != known.arrays[name].shape for name in stored):
        return "has arrays of another shape"
    return ""


def _key(name: str) -> tuple[str, str]:
    return name.partition("/")[0], name.rpartition("-")[2]


def _roles(group: h5py.Group) -> tuple[list[str], list[str]]:
    """The axes of a result, and its arrays that hold one entry per unit, without `done`."""
    items = groups.datasets(group)
    where = handles.places(group.id)
    of = {name: handles.Handle(item).dims(name, where) for name, item in items.items()}
    axes = [name for name in of if of[name] == (name,)]
    units = of.get("done", ())
    return axes, [n for n in of if n != "done" and n not in axes and units and of[n][: len(units)] == units]


def _unequal(mine: np.ndarray, theirs: np.ndarray, axes: int) -> np.ndarray:
    """Where values differ, over the unit axes; NaN equals NaN."""
    differ = mine != theirs
    if mine.dtype.kind == "f":
        differ &= ~(np.isnan(mine) & np.isnan(theirs))
    return np.asarray(differ.reshape(*differ.shape[:axes], -1).any(axis=-1))

"""The write side of a results file: a journal per running question, merged into the HDF5 file by replacement.

The file itself is never written in place: a copy is extended and replaces it, so that readers see a complete file
at any moment and a kill loses nothing that a probe had finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from landscape.journal import Busy, Journal, Record
from landscape.probe import Plan, Quantity, Unit, Values

FORMAT = 1
Arrays = dict[str, np.ndarray]
Reduce = Callable[[Arrays], Values]


@dataclass(frozen=True)
class Question:
    """What one group of the file answers; its digest decides what resumes and what gets a group of its own.

    Args:
        probe: name of the probe.
        label: readable part of the group's name; not part of the question.
        digest: of everything that can change the answer.
        plan: units, quantities, axes.
        attributes: stored with the group (parameters, spec, versions, ...).
    """

    probe: str
    label: str
    digest: str
    plan: Plan
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Writer:
    """The only writer of one question: takes finished units, survives kills, merges; a context manager.

    Args:
        path: the results file.
        question: what is measured.
        reduce_of: gives the reduction of a stored group from its probe name and parameters, for summaries.

    Raises:
        Busy: the same question is being measured by another process.
        ValueError: the file is no results file, or is of a newer format.
        PermissionError: it is read-only.
    """

    def __init__(
        self,
        path: Path,
        question: Question,
        *,
        reduce_of: Callable[[str, Mapping[str, Any]], Reduce | None] = lambda probe, parameters: None,
    ) -> None:
        check(path, writable=True)
        self.path, self.question, self._reduce_of = path, question, reduce_of
        path.parent.mkdir(parents=True, exist_ok=True)
        journal_path = path.with_name(f"{path.name}.journal-{question.digest}")
        try:
            self._journal = Journal(journal_path)
        except Busy:
            raise Busy(
                f"this question ({question.probe}, {question.label}) is being measured into {path} by another "
                "process; wait for it, or give another --out"
            ) from None
        try:
            self.merge()  # what an earlier, killed run had finished; and an early word on a file that cannot be written
        except BaseException:
            self._journal.__exit__(None, None, None)
            raise

    def pending(self) -> list[Unit]:
        """Units not yet done, in order."""
        done = read_group(self.path, self.group)["done"]
        return [unit for unit in self.question.plan.units() if not done[unit.index]]

    def write(self, unit: Unit, values: Values) -> None:
        """Keep one finished unit."""
        wanted = self.question.plan.quantities
        if set(values) != set(wanted):
            raise ValueError(f"{self.question.probe} measured {sorted(values)}, its plan promises {sorted(wanted)}")
        arrays = {name: np.asarray(values[name], dtype=wanted[name].dtype) for name in wanted}
        self._journal.append(Record({"index": list(unit.index)}, arrays))

    def merge(self) -> None:
        """Bring everything finished so far into the file, with summaries, by atomic replacement."""
        with contextlib.ExitStack() as orphans:
            with _replacement(self.path) as file:
                group = _question_group(file, self.question)
                self.group = group.name.strip("/")
                _merge_records(group, self._journal.records(), self._reduce_of)
                adopted = [orphans.enter_context(journal) for journal in _orphans(self.path)]
                for journal in adopted:
                    _adopt(file, journal, self._reduce_of)
            for journal in adopted:  # only now are their units safe in the file
                journal.remove()
        self._journal.clear()
        self._journal.append(_header(self.question))

    def close(self) -> None:
        """Merge and remove the journal."""
        self.merge()
        self._journal.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, OSError):
                self.close()  # also after an interrupt: finished units are kept
        finally:
            self._journal.__exit__(kind, error, trace)


def discard(path: Path, question: Question) -> None:
    """Remove the stored answer to a question (`--overwrite`)."""
    check(path, writable=True)
    path.with_name(f"{path.name}.journal-{question.digest}").unlink(missing_ok=True)
    if path.exists():
        with _replacement(path) as file:
            for name in _groups_of(file, question.probe, question.digest):
                del file[name]


def stored(path: Path, probe: str, digest: str) -> str | None:
    """Name of the group that already holds (part of) the answer, whatever its label."""
    if not path.exists():
        return None
    check(path)
    with h5py.File(path, "r", locking=False) as file:
        return next(iter(_groups_of(file, probe, digest)), None)


def read_group(path: Path, group: str) -> Arrays:
    """All arrays of one group, by name."""
    with h5py.File(path, "r", locking=False) as file:
        return _arrays(file[group])


def attribute(path: Path, group: str, name: str) -> Any:
    """One attribute of a stored group."""
    with h5py.File(path, "r", locking=False) as file:
        return file[group].attrs[name]


def check(path: Path, *, writable: bool = False) -> None:
    """Refuse a file that this version cannot use, in one line.

    Raises:
        FileNotFoundError, ValueError, PermissionError: see the message.
    """
    if not path.exists():
        if not writable:
            raise FileNotFoundError(f"no results file at {path}; run a probe first, for example: landscape surface")
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected an HDF5 results file")
    if not h5py.is_hdf5(path):
        raise ValueError(f"{path} is not an HDF5 file; give another --out, or move it away")
    try:
        with h5py.File(path, "r", locking=False) as file:
            version = file.attrs.get("format")
    except OSError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away and measure again") from None
    if not isinstance(version, int | np.integer):
        raise ValueError(f"{path} is not a results file of landscape (no attribute format); give another --out")
    if version > FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads up to {FORMAT}; update landscape")
    if writable and not path.stat().st_mode & 0o222:
        raise PermissionError(f"{path} is read-only; make it writable (chmod u+w), or give another --out")


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[h5py.File]:
    """A writable copy of the file that takes its place if the block succeeds, under the file's lock."""
    with _lock(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            if path.exists():
                shutil.copyfile(path, temporary)
            with h5py.File(temporary, "r+" if path.exists() else "w") as file:
                file.attrs["format"] = FORMAT
                yield file
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            # h5py reports a failed write as either, at the write or when it closes the file
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise OSError(f"cannot write {path}: {reason}; what was finished is kept in its journal") from error
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Mutual exclusion of merges, by a lock file that leaves no trace."""
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


def _header(question: Question) -> Record:
    """Enough to merge the journal without the process that wrote it."""
    plan = question.plan
    arrays: Arrays = {f"axis:{name}": values for name, values in {**plan.over, **plan.axes}.items()}
    arrays |= {f"label:{name}": _plain(values) for name, (_, values) in plan.labels.items()}
    groups = {"quantities": plan.quantities, "summaries": plan.summaries, "about": plan.about}
    data: dict[str, Any] = {key: {n: asdict(q) for n, q in table.items()} for key, table in groups.items()}
    data["labels"] = {name: asdict(quantity) for name, (quantity, _) in plan.labels.items()}
    data |= {"over": list(plan.over), "axes": list(plan.axes), "facts": dict(plan.facts)}
    data |= {"probe": question.probe, "label": question.label, "digest": question.digest}
    return Record({"question": data, "attributes": dict(question.attributes)}, arrays)


def _question(header: Record) -> Question:
    data = header.data["question"]

    def table(key: str) -> dict[str, Quantity]:
        return {name: Quantity(**{**q, "dims": tuple(q["dims"])}) for name, q in data[key].items()}

    plan = Plan(
        over={name: header.arrays[f"axis:{name}"] for name in data["over"]},
        quantities=table("quantities"),
        axes={name: header.arrays[f"axis:{name}"] for name in data["axes"]},
        labels={name: (q, header.arrays[f"label:{name}"]) for name, q in table("labels").items()},
        summaries=table("summaries"),
        about=table("about"),
        facts=data["facts"],
    )
    return Question(data["probe"], data["label"], data["digest"], plan, header.data["attributes"])


def _orphans(path: Path) -> Iterator[Journal]:
    """Journals beside the file whose writers are gone, locked; those of living writers are left alone."""
    for name in sorted(path.parent.glob(f"{path.name}.journal-*")):
        with contextlib.suppress(Busy):
            yield Journal(name)


def _adopt(file: h5py.File, journal: Journal, reduce_of: Callable[[str, Mapping[str, Any]], Reduce | None]) -> None:
    records = journal.records()
    header = next(records, None)
    if header is not None:
        _merge_records(_question_group(file, _question(header)), records, reduce_of)


def _groups_of(file: h5py.File, probe: str, digest: str) -> list[str]:
    return [f"{probe}/{name}" for name in file.get(probe, ()) if name.endswith(f"-{digest}")]


def _question_group(file: h5py.File, question: Question) -> h5py.Group:
    existing = _groups_of(file, question.probe, question.digest)
    return file[existing[0]] if existing else _create(file, question)


def _create(file: h5py.File, question: Question) -> h5py.Group:
    """A group with every axis, label and (empty) quantity of the plan, ready for any HDF5 reader."""
    plan = question.plan
    group = file.create_group(f"{question.probe}/{question.label}-{question.digest}")
    for name, value in {**question.attributes, **plan.facts}.items():
        group.attrs[name] = value
    group.attrs["probe"], group.attrs["label"] = question.probe, question.label
    group.attrs["created"], group.attrs["finished"] = _now(), ""
    for name, values in {**plan.over, **plan.axes}.items():
        axis = group.create_dataset(name, data=values)
        axis.make_scale(name)
        _describe(axis, plan.about.get(name, Quantity(name)))
    units = tuple(plan.over)
    for name, (quantity, values) in plan.labels.items():
        _dataset(group, name, quantity, quantity.dims, plan, data=_plain(values))
    for name, quantity in plan.quantities.items():
        _dataset(group, name, quantity, units + quantity.dims, plan)
    for name, quantity in plan.summaries.items():
        _dataset(group, name, quantity, quantity.dims, plan)
    done = Quantity("1 where the unit is finished", dtype="uint8")
    _dataset(group, "done", done, units, plan, data=np.zeros(plan.shape, np.uint8))
    return group


def _dataset(
    group: h5py.Group,
    name: str,
    quantity: Quantity,
    dims: tuple[str, ...],
    plan: Plan,
    *,
    data: np.ndarray | None = None,
) -> None:
    shape = tuple(len(plan.axis(dim)) for dim in dims)
    if data is None:
        data = np.full(shape, np.nan if np.dtype(quantity.dtype).kind == "f" else 0, quantity.dtype)
    if data.dtype.kind == "U":
        dataset = group.create_dataset(name, data=data.astype(object), dtype=h5py.string_dtype())
    else:
        dataset = group.create_dataset(name, data=data)
    _describe(dataset, quantity)
    for axis, dim in enumerate(dims):
        dataset.dims[axis].attach_scale(group[dim])


def _describe(dataset: h5py.Dataset, quantity: Quantity) -> None:
    dataset.attrs["long_name"], dataset.attrs["units"] = quantity.long_name, quantity.units


def _merge_records(
    group: h5py.Group,
    records: Iterator[Record],
    reduce_of: Callable[[str, Mapping[str, Any]], Reduce | None],
) -> None:
    fresh = [record for record in records if "index" in record.data]
    if not fresh:
        return
    names = list(fresh[0].arrays)
    arrays = {name: group[name][()] for name in [*names, "done"]}
    for record in fresh:
        index = tuple(record.data["index"])
        for name in names:
            arrays[name][index] = record.arrays[name]
        arrays["done"][index] = 1
    for name, values in arrays.items():
        group[name][...] = values
    reduce = reduce_of(group.attrs["probe"], json.loads(group.attrs.get("parameters", "{}")))
    if reduce is not None:
        for name, value in reduce(_arrays(group)).items():
            group[name][...] = value
    if arrays["done"].all():
        group.attrs["finished"] = _now()


def _arrays(group: h5py.Group) -> Arrays:
    return {name: _decoded(group[name]) for name in group if isinstance(group.get(name, getlink=True), h5py.HardLink)}


def _decoded(dataset: h5py.Dataset) -> np.ndarray:
    text = h5py.check_string_dtype(dataset.dtype)
    return np.asarray(dataset.asstr()[()] if text else dataset[()])


def _plain(values: np.ndarray) -> np.ndarray:
    """Text as fixed-width unicode: an object array has no bytes of its own."""
    return np.asarray(values, dtype=np.str_) if np.asarray(values).dtype.kind in "OSU" else np.asarray(values)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

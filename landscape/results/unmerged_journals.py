"""Merge the journals beside a results file, keep those that cannot be read, and tell how far each result is."""

import contextlib
import logging
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from landscape.probe import Plan
from landscape.results import creation, handles, hdf5_file, malformed, replacing, run_key, series, updating
from landscape.results import group as groups
from landscape.results.group import results_in
from landscape.results.journal import Busy, Journal, NotAJournal, Record, records_of

LARGEST = 2**26  # bytes of a result that is created from its journal alone
MOST_ARRAYS = 1000  # of a result, which has 60 at most
SHOWN = 8  # ranges of unfinished units
RESERVED = 50  # attributes that are added to those of a journal
DIGEST = re.compile(r"[0-9a-f]{10}")
UNREADABLE = (*hdf5_file.DAMAGE, LookupError, ValueError, struct.error)
_log = logging.getLogger(__name__)


def merge_orphans(path: Path, *, reduce_of: run_key.ReduceOf) -> None:
    """Merge the journals of killed processes, so that the file says how far each result got."""
    path = replacing.behind_link(path)
    hdf5_file.check(path, writable=True)
    if not journals(path):
        return
    with updating.locked(path), contextlib.ExitStack() as stack:
        found = [stack.enter_context(journal) for journal in orphans(path)]
        if found:
            remove(found, updating.update(path, lambda file: [adopt(file, journal, reduce_of) for journal in found]))


def stored_attribute(
    path: Path, probe: str, digest: str, name: str, reduce_of: run_key.ReduceOf, *, autotuned: bool = False
) -> Any:
    """An attribute of the result that a run continues, with what killed processes measured of it; None without one.

    With `autotuned`, of that in which an earlier run stored its choices, found by the digest before autotuning.
    """
    merge_orphans(path, reduce_of=reduce_of)
    group = groups.stored_group(path, probe, digest, autotuned=autotuned)
    return None if group is None else groups.attribute(path, group, name)


def journals(path: Path) -> list[Path]:
    """The journals beside a results file: other files whose names begin alike are not ours."""
    start = f"{path.name}.journal-"
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(f for f in beside if f.name.startswith(start) and DIGEST.fullmatch(f.name[len(start) :]))


def orphans(path: Path) -> Iterator[Journal]:
    """Journals beside the file whose writers are gone, locked; those of living writers are skipped."""
    for name in journals(path):
        with contextlib.suppress(Busy, NotAJournal):
            yield Journal(name)


def adopt(file: h5py.File, journal: Journal, reduce_of: run_key.ReduceOf) -> str:
    """Merge a journal by its own header; returns why it could not be read, "" where it could."""
    probe, stored = "", set[str]()
    try:
        records = list(journal.records())
        if not any({"index", *series.WORDS} & record.data.keys() for record in records):
            return ""
        key = key_of(records, journal.path)
        require_fitting(records, key.plan)
        probe, stored = key.probe, set(file.get(key.probe, ()))
        check_plan(key, stored=groups.name_with_digest(file, key.probe, key.digest) is not None)
        if key.plan.grows:
            series.adopt(file, key, records)
        else:
            groups.merge(groups.open_or_create(file, key), records, reduce_of)
    except UNREADABLE as error:
        for name in set(file[probe]) - stored if probe and probe in file else ():
            del file[probe][name]  # a group that was created only in part
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def remove(orphans: Sequence[Journal], reasons: Sequence[str]) -> None:
    """Remove journals whose units are safe in the file now; what could not be read is kept under another name."""
    for journal, reason in zip(orphans, reasons, strict=True):
        if journal.unreadable or reason:
            set_aside(journal, reason)
        journal.remove()


def set_aside(journal: Journal, reason: str = "") -> None:
    """Keep a journal that cannot be read, or only in part, under another name, and say so."""
    why = f"none of its units can be merged ({reason})" if reason else journal.unreadable
    kept = journal.set_aside()
    _log.warning("warning: %s: %s; the whole file is kept as %s", journal.path, why, kept.name)


def key_of(records: Sequence[Record], path: Path) -> run_key.RunKey:
    """The key in the header of the journal at a path.

    Raises:
        ValueError: there is none, it makes no sense, or the journal has the name of another result.
    """
    header = next((record for record in records if "key" in record.data), None)
    if header is None:
        raise ValueError("its header is lost")
    key = run_key.from_header(header)
    if not (re.fullmatch(r"[\w-]+", key.probe) and DIGEST.fullmatch(key.digest)):
        raise ValueError(f"it belongs to no result, but to {key.probe!r} {key.digest!r}")
    if not path.name.endswith(f"-{key.digest}"):
        raise ValueError(f"it belongs to {key.probe} {key.digest}")
    return key


def require_fitting(records: Sequence[Record], plan: Plan) -> None:
    """Reject units that are not those of a plan. Raises ValueError: names the first one."""
    wanted = {
        name: (quantity.dtype, tuple(len(plan.axis(dim)) for dim in quantity.dims))
        for name, quantity in plan.quantities.items()
    }
    for record in records:
        if "index" in record.data or series.AT in record.data:
            found = {name: (array.dtype.name, array.shape) for name, array in record.arrays.items()}
            if not _has_place(record, plan) or found != wanted:
                at = tuple(record.data["index"]) if "index" in record.data else record.data[series.AT]
                raise ValueError(f"its unit {at} does not belong to its plan")


def _has_place(record: Record, plan: Plan) -> bool:
    """Whether the unit of a record is one of a plan; a series takes any whole number."""
    if plan.grows or "index" not in record.data:
        return plan.grows and isinstance(record.data.get(series.AT), int)
    index = tuple(record.data["index"])
    return len(index) == len(plan.shape) and all(0 <= i < n for i, n in zip(index, plan.shape, strict=True))


def check_plan(key: run_key.RunKey, *, stored: bool) -> None:
    """Reject a key of a journal with which no result begins: what it declares would take memory, or spoil the file.

    Its arrays are counted unless they are `stored` in the file; those of a series grow by a part at a time.

    Raises:
        ValueError: it declares something else than numbers, texts and names, or more than a result has.
    """
    plan, about = key.plan, {**key.attributes, **key.plan.facts}
    malformed.check_attributes({**about, "probe": key.probe, "label": key.label}, key.probe)
    declared = {**plan.quantities, **plan.summaries}
    names = [*plan.over, *plan.axes, *plan.labels, *declared]
    if len(names) > MOST_ARRAYS or len(about) > hdf5_file.MOST_ATTRIBUTES - RESERVED:
        raise ValueError(f"it declares {len(names):,} arrays and {len(about):,} attributes, more than a result has")
    if wrong := [name for name in (*names, *about) if "/" in name or not name.isprintable()]:
        raise ValueError(f"it declares the name {wrong[0]!r}")
    if wrong := [name for name, quantity in declared.items() if np.dtype(quantity.dtype).kind not in malformed.NUMBERS]:
        raise ValueError(f"it declares {wrong[0]} of the type {declared[wrong[0]].dtype}")
    dims = [(*plan.over, *quantity.dims) for quantity in plan.quantities.values()]
    dims += [quantity.dims for quantity in plan.summaries.values()]
    rows = {
        name: max(len(values), creation.GROWTH) if plan.grows else len(values) for name, values in plan.over.items()
    }
    size = 8 * sum(math.prod(rows.get(n) or len(plan.axis(n)) for n in names) for names in [*dims, tuple(plan.over)])
    if size > LARGEST and (plan.grows or not stored):
        raise ValueError(f"it declares {size:,} bytes, and no file holds that result; expected at most {LARGEST:,}")


@dataclass(frozen=True)
class Standing:
    """A result, with the finished units of its journal, and whether a process of this machine is measuring it."""

    group: str
    attributes: Mapping[str, Any]
    done: np.ndarray  # over the unit axes
    running: bool = False

    @property
    def finished(self) -> int:
        return int(self.done.sum())

    def missing(self) -> str:
        """The unfinished units as ranges of their positions in the plan, such as `3-8, 12`; `SHOWN` ranges at most."""
        at = np.flatnonzero(~self.done.ravel())
        runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if at.size else []
        shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:SHOWN]]
        return ", ".join([*shown, *(["..."] if len(runs) > SHOWN else [])])


def standings(path: Path) -> list[Standing]:
    """Return all results of a file and of the journals beside it.

    Raises:
        FileNotFoundError, ValueError: there is neither, or the file cannot be read.
    """
    path = replacing.behind_link(path)
    found: dict[tuple[str, str], Standing] = {}
    beside = journals(path)
    if path.exists() or not beside:
        hdf5_file.check(path)
        with hdf5_file.naming_damage(path), hdf5_file.reading(path) as file:
            for name, group in results_in(file):
                with malformed.readable(path, name):
                    done = handles.array_of(group["done"]) == 1 if "done" in group else np.ones((), bool)
                    malformed.check_attributes(held := handles.attributes_of(group.id), name.partition("/")[0])
                found[name.partition("/")[0], name.rpartition("-")[2]] = Standing(name, held, done)
    for journal in beside:
        try:
            records = records_of(journal)
            key = key_of(records, journal)
            require_fitting(records, key.plan)
            check_plan(key, stored=(key.probe, key.digest) in found)
        except (NotAJournal, *UNREADABLE):
            continue  # merged and removed in the meantime, or for the next merge to set aside
        at = key.probe, key.digest
        stored = found.get(at)
        name = f"{key.probe}/{run_key.safe_label(key.label)}-{key.digest}" if stored is None else stored.group
        about = {**key.attributes, "probe": key.probe, "label": key.label} if stored is None else stored.attributes
        done = np.zeros(key.plan.shape, bool) if stored is None else stored.done
        found[at] = Standing(name, about, _with(done, records), _is_locked(journal))
    return [found[at] for at in sorted(found)]


def _with(done: np.ndarray, records: list[Record]) -> np.ndarray:
    done = done.copy()
    for record in records:
        if "index" in record.data:
            index = tuple(record.data["index"])
            if len(index) == done.ndim and all(0 <= i < n for i, n in zip(index, done.shape, strict=True)):
                done[index] = True
    return done


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock on a file, where the system lists its locks (Linux).

    To try the lock would make a writer that starts at this moment believe that another one has it.
    """
    try:
        status, locks = path.stat(), Path("/proc/locks").read_text()
    except OSError:
        return False
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(place in line.split() and "FLOCK" in line.split() for line in locks.splitlines())

"""How far each result of a file is, units in journals included; nothing is locked or changed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from landscape.results.group import results_in
from landscape.results.handles import array_of, attributes_of
from landscape.results.hdf5_file import DAMAGE, check, damaged, reading
from landscape.results.journal import NotAJournal, Record, records_of
from landscape.results.malformed import check_attributes, readable
from landscape.results.replacing import behind_link
from landscape.results.run_key import safe_label
from landscape.results.unmerged_journals import UNREADABLE, check_plan, journals, key_of, require_fitting


@dataclass(frozen=True)
class Standing:
    """A result, with the finished units of its journal, and whether a process of this machine is measuring it."""

    group: str
    attributes: Mapping[str, Any]
    done: np.ndarray  # over the unit axes
    running: bool = False

    @property
    def finished(self) -> int:
        """How many units are finished."""
        return int(self.done.sum())

    def missing(self, most: int = 8) -> str:
        """The unfinished units as ranges of their positions in the plan, such as `3-8, 12`; the first `most` ranges."""
        at = np.flatnonzero(~self.done.ravel())
        runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if at.size else []
        shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most]]
        return ", ".join([*shown, *(["..."] if len(runs) > most else [])])


def standings(path: Path) -> list[Standing]:
    """All results of a file and of the journals beside it.

    Raises:
        FileNotFoundError, ValueError: there is neither, or the file cannot be read.
    """
    path = behind_link(path)
    found: dict[tuple[str, str], Standing] = {}
    beside = journals(path)
    if path.exists() or not beside:
        check(path)
        try:
            with reading(path) as file:
                for name, group in results_in(file):
                    with readable(path, name):
                        done = array_of(group["done"]) == 1 if "done" in group else np.ones((), bool)
                        check_attributes(held := attributes_of(group.id), name.partition("/")[0])
                    found[name.partition("/")[0], name.rpartition("-")[2]] = Standing(name, held, done)
        except DAMAGE as error:
            raise damaged(path, error) from error
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
        name = f"{key.probe}/{safe_label(key.label)}-{key.digest}" if stored is None else stored.group
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

"""Protection from damaged results files, on which the HDF5 library itself may crash."""

import contextlib
import gc
import math
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from landscape.options import counted
from landscape.running.worker_process import picklable

T = TypeVar("T")
LARGE = 2**20  # numbers above which a few of an array are read


def check_not_damaged(file: Path) -> None:
    """Read a results file in a child process first, so that a crash of HDF5 becomes an error message.

    Skipped if torch is loaded or other threads run, because a forked child would lose them.

    Raises:
        ValueError: the child crashed.
    """
    if not file.is_file() or not _may_fork():
        return
    import h5py

    from landscape.results import hdf5_file
    from landscape.results.handles import attributes_of

    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):  # the parent will meet the same error and report it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with hdf5_file.reading(
                file
            ) as stored:  # what a reader asks of HDF5, which the header of an array spares it
                for group in hdf5_file.checked_groups(stored, file):
                    dict(attributes_of(group.id, header=group.header))
                    where = {place: name for name, place in group.members.items()}
                    for item in group.datasets.values():
                        item.attributes()
                        item.scales(where)
                        item.array() if math.prod(item.shape or ()) < LARGE else h5py.Dataset(item.id)[:1]
        os._exit(0)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        raise ValueError(f"{file} is damaged (HDF5 crashes on it); save what is intact with: landscape repair {file}")


def in_child(work: Callable[[], T], files: Sequence[Path]) -> T:
    """The result of work that reads results files, done in a child process, so that a crash of HDF5 becomes an error.

    For work that reads too many files to read all of them twice. Done in this process where `check_not_damaged` would
    be skipped.

    Raises:
        ValueError: the child crashed; names the file.
        Exception: what the work raised.
    """
    if not _may_fork():
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        gc.disable()  # it ends soon
        with contextlib.suppress(BaseException), open(writing, "wb") as pipe:
            pipe.write(pickle.dumps(_outcome(work)))
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    ended = None
    try:
        with open(reading, "rb") as pipe:
            content = pipe.read()
        _, ended = os.waitpid(child, 0)
    finally:
        if ended is None:  # this process was interrupted
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
    if not content:
        for file in files:
            check_not_damaged(file)
        how = signal.Signals(ended).name if (ended := ended & 127) else "exited"
        what = counted(len(files), "file")
        raise RuntimeError(f"the process that read {what} died ({how}); nothing was written, run again")
    result, error = pickle.loads(content)  # from the child, over a pipe that nobody else has
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, picklable(error)


def _may_fork() -> bool:
    return "torch" not in sys.modules and threading.active_count() == 1

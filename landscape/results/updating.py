"""Change a results file as a whole: under a lock a copy is changed, and replaces it.

The HDF5 file is never written in place, so that readers always see a complete file.
"""

import contextlib
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import h5py

from landscape.results.hdf5_file import FORMAT, accept, check, state_of
from landscape.results.replacing import behind_link, replacing

T = TypeVar("T")
ATTEMPTS = 10  # at a change during which programs without the lock replace the file


def update(path: Path, change: Callable[[h5py.File], T]) -> T:
    """Change a copy of the file, made if absent, which then replaces it; call it under the file's lock.

    If somebody without the lock replaces the file in the meantime, what they wrote is changed instead.

    Raises:
        ValueError, PermissionError: as `check`.
        OSError: it cannot be written.
    """
    for _ in range(ATTEMPTS):
        check(path, writable=True)
        before = state_of(path)
        # In memory: HDF5 cannot close a file on a full disk, and complains on stderr from its destructor.
        content = io.BytesIO(path.read_bytes() if before else b"")
        with h5py.File(content, "r+" if before else "w") as file:
            file.attrs["format"] = FORMAT
            result = change(file)
        try:
            with replacing(path, temporary=f".{path.name}.merging") as stream:
                stream.write(content.getbuffer())
                stream.flush()
                os.fsync(stream.fileno())
                if state_of(path) != before:
                    raise _ReplacedMeanwhileError
            accept(path)
        except _ReplacedMeanwhileError:
            continue
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"cannot write {path}: {reason}; what was finished is kept in its journal") from error
        return result
    raise OSError(f"cannot write {path}: other programs keep replacing it; what was finished is kept in its journal")


def change_file(path: Path, change: Callable[[h5py.File], T]) -> T:
    """As `update`, under the file's lock."""
    path = behind_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        return update(path, change)


class _ReplacedMeanwhileError(Exception):
    pass


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Mutual exclusion of those who change a file, by a lock file that is removed afterwards.

    While it is held, a locked journal belongs to a living writer, never to a merge that is adopting it.

    Raises:
        OSError: the folder cannot be written, or the lock file's name is that of a link or a folder.
    """
    name = path.with_name(f"{path.name}.lock")
    while True:
        try:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if not os.path.lexists(name):
                reason = f"its folder cannot be written ({error.strerror})"
                raise OSError(f"cannot write {path}: {reason}; make it writable, or give another --out") from error
            raise OSError(f"{name} cannot be used as a lock ({error.strerror}); move it away") from error
        fcntl.flock(handle, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.lstat(name)):
                break
        os.close(handle)
    try:
        yield
    finally:
        if not os.fstat(handle).st_size:  # one with content is not ours
            name.unlink(missing_ok=True)
        os.close(handle)

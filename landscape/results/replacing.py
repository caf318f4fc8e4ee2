"""Write a file so that a kill or a full disk leaves the old one, never a part: to a temporary file that replaces it."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CREATED = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def behind_link(path: Path) -> Path:
    """The file that a path leads to: the target of a symbolic link of the user's own, else the path itself.

    Raises:
        PermissionError: the link belongs to another user, who could lead the write anywhere.
    """
    if not path.is_symlink():
        return path
    if os.lstat(path).st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} is a symbolic link of another user; give the file that it leads to")
    return Path(os.path.realpath(path))


def check_place(path: Path, of: str = "", example: str = "") -> None:
    """Refuse a place in which no file may come, before the work for it: a folder, a device or a pipe.

    Raises:
        ValueError: it is a folder, in place of an output `of` something that has an `example` of a name.
        OSError: it is something else that is no regular file.
    """
    if of and path.is_dir():
        raise ValueError(f"{path} is a folder, expected a file for the {of}, such as {path / example}")
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextlib.contextmanager
def replacing(path: Path, *, temporary: str = "") -> Iterator[BinaryIO]:
    """A stream; what is written to it replaces the file when the block ends without an error, as it is on the disk.

    A new file has the permissions of the user's umask, a replaced one those that it had. `temporary` is the name of the
    file in between where only one process writes at a time: what a kill leaves behind, the next one replaces.

    Raises:
        OSError: the folder cannot be written, the disk is full, or the path is that of a device, a pipe or a folder.
    """
    path = behind_link(path)
    check_place(path)
    between = path.with_name(temporary or f".{path.name[:200]}.{secrets.token_hex(4)}")
    if temporary:
        between.unlink(missing_ok=True)
    handle = os.open(between, _CREATED, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(handle, path.stat().st_mode & 0o777)
            yield stream
            stream.flush()
            os.fsync(handle)
        os.replace(between, path)
    except OSError as error:
        if error.filename is None and error.strerror:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        between.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Replace a text file, in a folder that is made where there is none; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        stream.write(text.encode())
    return path

"""The user's cache folder, for what takes long to make and is used by later runs too."""

import contextlib
import functools
import logging
import os
import stat
import sys
import tempfile
import time
from pathlib import Path

VARIABLE = "LANDSCAPE_CACHE"  # another folder; empty: nothing is kept
UNFINISHED = "unfinished-"  # start of the names of files that are being written
ABANDONED = 86_400.0  # seconds after which nobody works on an unfinished file any more
log = logging.getLogger(__name__)


def folder(name: str, what: str, *, temporary: bool = False) -> Path | None:
    """A part of the cache folder, made for the user alone; None, which is logged once, if it cannot be used.

    It counts only if it belongs to the user and nobody else can write it. `what` it holds is named in the message.
    With `temporary`, a folder among the system's temporary files stands in for one that cannot be used.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    home = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "landscape"
    places = [home / name]
    if temporary:
        user = os.getuid() if hasattr(os, "getuid") else ""
        places.append(Path(tempfile.gettempdir()) / f"landscape-{name}-{user}")
    for place in places:
        try:
            return _usable(place)
        except (OSError, RuntimeError) as error:  # expanduser without a home
            _say_once(f"{what} are not kept for later runs in {place.parent}: {error}")
    return None


def _usable(path: Path) -> Path:
    """The folder, made if necessary; `OSError` if it cannot be used."""
    path = path.expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_own(path):
        raise PermissionError(f"{path} belongs to, or can be written by, another user")
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is read-only")
    return path


@functools.cache
def _say_once(text: str) -> None:
    log.info("%s", text)


def is_own(path: Path) -> bool:
    """Whether it is a regular file or a folder, the user's own, and writable by nobody else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    regular = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)  # on a pipe, reading waits for ever
    return own and regular and not found.st_mode & 0o022


def write(path: Path, content: bytes) -> None:
    """Write a file that the user alone can read, whole or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(unfinished, path)
    finally:  # still there on a full disk
        Path(unfinished).unlink(missing_ok=True)


def forget_oldest(place: Path, most_bytes: int, most_files: int = sys.maxsize, *, newest: Path | None = None) -> None:
    """Delete the files used longest ago beyond the most that are kept, and what killed processes left behind."""
    with contextlib.suppress(OSError):  # another process removes files, too
        used = sorted(((file.stat().st_mtime, file) for file in place.iterdir()), reverse=True)
        size = 0
        for number, (last, file) in enumerate(used):
            size += file.stat().st_size
            abandoned = file.name.startswith(UNFINISHED) and time.time() - last > ABANDONED
            if file != newest and (abandoned or number >= most_files or size > most_bytes):
                file.unlink(missing_ok=True)

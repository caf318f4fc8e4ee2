"""Tell files from others by the content that a measurement reads of them, so that no stored result is stale."""

import functools
import hashlib
import os
from pathlib import Path

import numpy as np

from landscape.checkpoints import raw_files

KNOWN = 1024  # digests that are remembered


def rows_sha256(path: Path, rows: np.ndarray) -> str:
    """SHA-256 of some rows of an array file and of what the array is, at 2 GB/s; of unchanged files at once.

    Raises:
        OSError, ValueError: there is no such file, or it is no array.
    """
    known = path.stat()
    return _rows_sha256(path, known.st_size, known.st_mtime_ns, np.sort(rows).astype(np.int64).tobytes())


@functools.lru_cache(maxsize=KNOWN)
def _rows_sha256(path: Path, size: int, changed: int, rows: bytes) -> str:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    digest = hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode())
    chosen = np.frombuffer(rows, np.int64)
    for block in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):  # rows that follow each other in the file
        digest.update(np.ascontiguousarray(array[block[0] : block[-1] + 1]).data)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file; of unchanged files at once."""
    known = path.stat()
    return _file_sha256(path, known.st_size, known.st_mtime_ns)


@functools.lru_cache(maxsize=64 * KNOWN)
def _file_sha256(path: Path, size: int, changed: int) -> str:
    return raw_files.file_sha256(path)


def listing_sha256(folder: Path) -> str:
    """SHA-256 of the names and sizes of all files below a folder, without opening them: of many compressed pictures."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(place, name)
            digest.update(f"{os.path.relpath(path, folder)} {os.stat(path).st_size}\n".encode())
    return digest.hexdigest()

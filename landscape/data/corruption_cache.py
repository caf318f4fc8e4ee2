"""Keep generated corruptions as uint8 in the user's cache folder, checked when they are read again."""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from landscape.data import corruptions, user_cache
from landscape.data.memory import format_bytes

MOST_BYTES = 4 * 2**30  # of all kept corruptions; more are made again each time
FREE = 4  # times the size of a file that has to be free on the disk
BLOCK = 256  # images that are made at a time
_log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where corruptions are kept; None if nothing is kept."""
    return user_cache.folder("corruptions", "generated corruptions")


def images(clean: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """`corruptions.corrupted` of all images (N, 3, H, W), read from the cache where they are known.

    The file is found by the digest of the clean images, package, seed, corruption and severity; a file whose content
    has another digest than when it was written is made again.
    """
    place = folder()
    key = f"{corruptions.maker()};{seed};{name};{severity};{tuple(clean.shape)};".encode()
    digest = hashlib.sha256(key + clean.contiguous().numpy().tobytes()).hexdigest()[:32]
    path = place / f"{digest}.uint8" if place is not None else None
    if path is not None and (found := _read(path, tuple(clean.shape))) is not None:
        return found
    blocks = [
        corruptions.corrupted(part, name, severity, seed, first=BLOCK * i)
        for i, part in enumerate(torch.split(clean, BLOCK))
    ]
    made = torch.cat(blocks)
    if path is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk: they are made again next time
            _write(path, made.numpy())
    return made


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    """The images of a file, None if there is none or it is damaged."""
    if not all(map(user_cache.is_own, (path, path.with_suffix(".sha256")))):
        return None
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_text()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(content).hexdigest() != digest or len(content) != int(np.prod(shape)):
        _log.warning("note: %s is damaged; these images are made again", path)
        return None
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape).copy())


def _write(path: Path, made: np.ndarray) -> None:
    used = sum(file.stat().st_size for file in path.parent.glob("*.uint8"))
    if used + made.nbytes > MOST_BYTES or FREE * made.nbytes > shutil.disk_usage(path.parent).free:
        _log.debug("generated corruptions are not kept: %s in %s already", format_bytes(used), path.parent)
        return
    content = made.tobytes()
    for target, data in ((path, content), (path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())):
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

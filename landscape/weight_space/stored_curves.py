"""Keep the control points of trained curves in the user's cache folder, so that no curve is trained twice."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.data import user_cache

MOST_BYTES = 4 * 2**30  # of all kept curves; those used last stay
_log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where control points are kept: if need be, among the system's temporary files; None if nothing is kept."""
    return user_cache.folder("curves", "trained curves", temporary=True)


def load(key: str, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The control point of a key, on the devices of tensors of the same names; None if there is no usable one.

    A file that is damaged, belongs to somebody else, or holds other tensors than those is not used.
    """
    path = _path(key)
    if path is None or not user_cache.is_own(path):
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        control, sha256 = content["control"], content["sha256"]
        intact = state_dict_sha256(control) == sha256 and _shapes(control) == _shapes(like)
        os.utime(path)
    except FileNotFoundError:  # another process has removed it meanwhile
        return None
    except Exception:  # torch's unpickler raises nearly anything on a damaged file
        intact = False
    if not intact:
        _log.warning("note: %s is damaged; the curve is trained again", path)
        path.unlink(missing_ok=True)
        return None
    return {name: control[name].to(tensor) for name, tensor in like.items()}


def store(key: str, control: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep a control point; returns the one that is kept: of two processes that train it at once, that of the first."""
    path = _path(key)
    if path is None:
        return dict(control)
    on_cpu = {name: tensor.cpu() for name, tensor in control.items()}
    content = {"control": on_cpu, "sha256": state_dict_sha256(on_cpu)}
    try:
        handle, temporary = tempfile.mkstemp(".pt", "unfinished-", path.parent)  # counted if it stays behind
        try:
            with os.fdopen(handle, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(handle)
            os.link(temporary, path)
        except FileExistsError:
            return load(key, control) or dict(control)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # a full disk, or one without hard links
        _log.warning("note: the trained curve is not kept, and is trained again by the next run: %s", error)
        return dict(control)
    with contextlib.suppress(OSError):  # another process removes files, too
        _forget_oldest(path)
    return dict(control)


def _path(key: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"{key}.pt"


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _forget_oldest(newest: Path) -> None:
    """Remove the curves that were not used for longest where all take too much space."""
    used = 0
    for path in sorted(newest.parent.glob("*.pt"), key=lambda path: path.stat().st_mtime, reverse=True):
        used += path.stat().st_size
        if used > MOST_BYTES and path != newest:
            path.unlink(missing_ok=True)

"""Decide which checkpoints a folder stands for: the last snapshot of a run, or each of several independent ones."""

import difflib
import logging
from pathlib import Path

from landscape.checkpoints import raw_files
from landscape.checkpoints.containers import Weights
from landscape.checkpoints.file_names import FINAL, SUFFIXES, model_hint
from landscape.checkpoints.snapshots import SHOWN, NotOneRun, checkpoints_in, command_files, of_run

_log = logging.getLogger(__name__)


def absent(path: Path) -> FileNotFoundError:
    """The error for a path that does not exist; it lists similar names in the same folder."""
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, 2, 0.7)
    similar = f"; there is {' and '.join(str(path.with_name(name)) for name in near)}" if near else model_hint(path)
    return FileNotFoundError(f"no checkpoint at {path}{similar}; give an existing file or a run's folder")


def what_to_measure(path: Path, *, weights: Weights = "raw", trust_pickle: bool = False) -> list[Path]:
    """The checkpoints that a path stands for; which of a folder's these are is logged.

    A folder stands for its `final.pt`, for the last snapshot if it is recognisable as one run, else for all of its
    checkpoints.

    Raises:
        FileNotFoundError: there is nothing at the path, or no checkpoint in the folder.
        ValueError: a checkpoint cannot be read.
    """
    if not path.exists():
        raise absent(path)
    if not path.is_dir() or raw_files.holds_weights(path):
        return [path]
    files = checkpoints_in(path)
    if not files:
        inside = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir() and checkpoints_in(folder)]
        hint = f"; its folders do: {path}/*" if inside else f" ({', '.join(SUFFIXES)}); give another folder"
        raise FileNotFoundError(f"{path} holds no checkpoint{hint}")
    if len(files) == 1:
        _log.debug("%s: %s, its only checkpoint, is measured", path, files[0].name)
        return files
    final = path / FINAL
    try:
        last = final if final in files else of_run(path, weights=weights, trust_pickle=trust_pickle)[-1].path
    except NotOneRun:
        names = ", ".join(file.name for file in files[:SHOWN]) + (", ..." if len(files) > SHOWN else "")
        _log.info("%s: %d checkpoints, each measured by itself: %s", path, len(files), names)
        return files
    which = f"of {len(files)} checkpoints" if last == final else f"the last of a run's {len(files)} checkpoints"
    level = logging.DEBUG if last == final else logging.INFO
    _log.log(level, "%s: %s, %s, is measured; name others: %s", path, last.name, which, command_files(path, files))
    return [last]


def checkpoint_of(path: Path, *, weights: Weights = "raw", trust_pickle: bool = False) -> Path:
    """The one checkpoint that a path stands for: a file, or a run's folder.

    Raises:
        FileNotFoundError, ValueError: as `what_to_measure`; or the folder holds several independent checkpoints.
    """
    if path.is_file() or not path.exists():
        return path
    files = what_to_measure(path, weights=weights, trust_pickle=trust_pickle)
    if len(files) > 1:
        names = ", ".join(str(file) for file in files[:SHOWN]) + (", ..." if len(files) > SHOWN else "")
        raise ValueError(f"{path} holds {len(files)} checkpoints that are not one run's; name one of them: {names}")
    return files[0]

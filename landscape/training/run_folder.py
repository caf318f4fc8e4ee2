"""Read and write the folder of a training run: snapshots, metrics, and the state that it resumes from."""

import csv
import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import read_checkpoint, save_atomically
from landscape.checkpoints.file_names import FINAL
from landscape.results.replacing import write_text

INIT, WARMUP, RESUME, METRICS = "init.pt", "warmup.pt", "resume.pt", "metrics.csv"


@dataclass(frozen=True)
class RunIdentity:
    """Everything that determines the weights of a run, under the keys of a checkpoint."""

    model: str
    model_args: Mapping[str, Any]
    data: Mapping[str, Any]
    recipe: Mapping[str, Any]
    seed: int


class AnotherRun(ValueError):
    """A folder holds a run that was trained otherwise."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder; create it, and remove it if it stays empty.

    The lock is the system's, on the folder itself: it ends with the process and leaves no file.

    Raises:
        RuntimeError: another process is training in it.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system may have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another process is training in {folder}; wait for it, or give this run another --out"
                ) from None
        yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()
        os.close(handle)


def half_precision(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with every matrix and kernel in half precision: half the bytes on disk.

    Biases, norms and statistics are few and keep their precision; so do tensors with values beyond its 65,504.
    """
    weights = {}
    for name, tensor in state_dict.items():
        half = tensor.half() if tensor.is_floating_point() and tensor.ndim >= 2 else tensor
        weights[name] = half if bool(half.isfinite().all()) else tensor
    return weights


def is_finished(folder: Path, identity: RunIdentity) -> bool:
    """Whether the folder holds this very run, finished. Raises AnotherRun: it holds another; names what differs."""
    here = _flat(asdict(identity))
    for recorded in _recorded(folder):
        there = _flat(asdict(recorded))
        differing = [name for name in {**here, **there} if there.get(name) != here.get(name)]
        if differing:
            shown = ", ".join(
                f"{name} {there.get(name)} in the folder, {here.get(name)} requested" for name in differing[:3]
            )
            raise AnotherRun(f"{folder} holds another run ({shown}); give this one another --out")
    return (folder / FINAL).exists()


def recorded_memory_format(folder: Path) -> str | None:
    """The memory format of the run in the folder, which a resumed run keeps; None if there is no run."""
    return next((str(identity.recipe["memory_format"]) for identity in _recorded(folder)), None)


def write_state(folder: Path, identity: RunIdentity, state: Mapping[str, Any]) -> None:
    """Replace the state that the run resumes from, atomically."""
    save_atomically({"identity": asdict(identity), **state}, folder / RESUME)


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state that the run resumes from, on the CPU; None if there is none.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / RESUME
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch reports damage in many ways
        raise ValueError(f"{path} is damaged ({type(error).__name__}); delete it to train from the start") from None
    return dict(state)


def write_metrics(folder: Path, rows: Sequence[Mapping[str, float]], columns: Sequence[str]) -> None:
    """Replace `metrics.csv`, one line per finished epoch, atomically.

    Raises:
        OSError: for example of a full disk; the previous table stays.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    try:
        write_text(folder / METRICS, text.getvalue())
    except OSError as error:
        raise OSError(f"cannot write {folder / METRICS}: {error.strerror}; free some space, then run again") from error


def newest_snapshot(folder: Path) -> Path | None:
    """The snapshot written last, None if there is none."""
    snapshots = [path for path in folder.glob("*.pt") if path.name != RESUME]
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)


def tidy(folder: Path) -> None:
    """Remove what a finished run no longer needs: its resume state and leftovers of killed writes."""
    for path in (folder / RESUME, *folder.glob(".*.pt.*")):
        path.unlink(missing_ok=True)


def _recorded(folder: Path) -> Iterator[RunIdentity]:
    """What the state and the checkpoints in a folder say about its run."""
    state = read_state(folder)
    if state is not None:
        yield RunIdentity(**state["identity"])
    for path in (folder / FINAL, folder / INIT):
        if path.exists():
            stored = read_checkpoint(path)
            yield RunIdentity(stored.model, stored.model_args, stored.data, stored.recipe, stored.seed)


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Nested entries under both keys: {"recipe": {"lr": 0.1}} becomes {"recipe lr": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        flat |= {f"{name} {key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat

"""The folder of a training run: its snapshots, the state it resumes from, and whose they are."""

from __future__ import annotations

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

from landscape.checkpoints import checkpoint
from landscape.training.recipes import EARLIER

FINAL = checkpoint.FINAL
FINAL_EMA = checkpoint.FINAL_EMA
INIT = "init.pt"
WARMUP = "warmup.pt"
RESUME = "resume.pt"
METRICS = "metrics.csv"


@dataclass(frozen=True)
class Identity:
    """All that decides the weights of a run, in the terms of a checkpoint."""

    model: str
    model_args: Mapping[str, Any]
    data: Mapping[str, Any]
    recipe: Mapping[str, Any]
    seed: int


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes from training in the folder, which is made, and removed if it stays empty.

    The lock is the system's and on the folder itself: it ends with the process and leaves no file.

    Raises:
        RuntimeError: another process holds it.
    """
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # where a file system has no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"{folder} is being trained in by another process; wait for it, or give this run another --name "
                    "or --out"
                ) from None
        yield
    finally:
        if new:
            with suppress(OSError):
                folder.rmdir()
        os.close(handle)


def write_snapshot(
    path: Path,
    identity: Identity,
    state_dict: Mapping[str, Tensor],
    *,
    epoch: float,
    metrics: Mapping[str, float],
) -> None:
    """Write one checkpoint of the run, atomically."""
    checkpoint.write(path, **asdict(identity), state_dict=state_dict, epoch=epoch, metrics=metrics)


def halved(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every matrix and kernel in half precision: half the bytes on disk.

    Biases, norms and statistics are few, and stay; so does what half precision cannot hold (beyond 65,504).
    """
    found = {}
    for name, tensor in state_dict.items():
        half = tensor.half() if tensor.is_floating_point() and tensor.ndim >= 2 else tensor
        found[name] = half if bool(half.isfinite().all()) else tensor
    return found


def refuse_another_run(folder: Path, identity: Identity) -> None:
    """Make sure that what the folder holds, if anything, comes from this very run.

    Raises:
        ValueError: naming what differs.
    """
    for name in (INIT, FINAL):
        if (folder / name).exists():
            found = checkpoint.read(folder / name)
            _same(
                folder,
                Identity(found.model, found.model_args, found.data, found.recipe, found.seed),
                identity,
            )
    state = read_state(folder)
    if state is not None:
        _same(folder, Identity(**state["identity"]), identity)


def recorded_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe of the run in the folder, with the fields that recipes did not have in its time; None if empty."""
    state = read_state(folder)
    if state is not None:
        return {**EARLIER, **state["identity"]["recipe"]}
    for name in (FINAL, INIT):
        if (folder / name).exists():
            return {**EARLIER, **checkpoint.read(folder / name).recipe}
    return None


def write_state(folder: Path, identity: Identity, state: Mapping[str, Any]) -> None:
    """Replace what the run resumes from, atomically."""
    checkpoint.save_atomically({"identity": asdict(identity), **state}, folder / RESUME)


def read_state(folder: Path) -> dict[str, Any] | None:
    """What the run resumes from, on the CPU; None where there is nothing.

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
    """Replace `metrics.csv`, atomically: one line per finished epoch.

    Raises:
        OSError: the disk is full, say; the previous table stays.
    """
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    partial = folder / f".{METRICS}.partial"
    try:
        partial.write_text(text.getvalue())
        os.replace(partial, folder / METRICS)
    except OSError as error:
        raise OSError(f"cannot write {folder / METRICS}: {error.strerror}; free some space, then run again") from error
    finally:
        partial.unlink(missing_ok=True)


def newest_snapshot(folder: Path) -> Path | None:
    """The snapshot written last, None where there is none."""
    snapshots = [path for path in folder.glob("*.pt") if path.name != RESUME]
    return max(snapshots, key=lambda path: path.stat().st_mtime_ns, default=None)


def tidy(folder: Path) -> None:
    """Remove what a finished run has no use for: its resume state and leftovers of killed writes."""
    for path in (folder / RESUME, *folder.glob(".*.pt.*")):
        path.unlink(missing_ok=True)


def _same(folder: Path, found: Identity, asked: Identity) -> None:
    there, here = _flat({**asdict(found), "recipe": {**EARLIER, **found.recipe}}), _flat(asdict(asked))
    differing = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    if differing:
        shown = ", ".join(f"{name} {there.get(name)} there, {here.get(name)} asked for" for name in differing[:3])
        raise ValueError(f"{folder} holds another run ({shown}); give this one another --name or --out")


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Nested entries under both names: {"recipe": {"lr": 0.1}} is {"recipe lr": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        flat |= {f"{name} {key}": v for key, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat

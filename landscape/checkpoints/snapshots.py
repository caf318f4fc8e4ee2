"""Find the snapshots of a training run, in order of epoch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from landscape.checkpoints.checkpoint import FINAL, Checkpoint, read_checkpoint, state_dict_sha256
from landscape.checkpoints.state_dict_loading import load_into, with_model_keys

SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
NOT_SNAPSHOTS = ("resume", "final_ema")  # a moving average is not a point of the trajectory
PROGRESS = "epochs?|ep|steps?|iterations?|iter"  # words in file names in front of a snapshot's number
NUMBER = r"\d+(?:\.\d+)?"


@dataclass(frozen=True)
class Snapshot:
    """One file of a run."""

    path: Path
    epoch: float  # as stored (a float, init 0), else the number in the file name
    sha256: str  # of its weights


def of_run(folder: Path) -> list[Snapshot]:
    """All different snapshots of a run, ordered by epoch; files with equal weights count once, the last is w_T.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are fewer than two different snapshots, or one has another architecture or no known epoch.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no run folder at {folder}; give the folder that holds the snapshots")
    files = sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES and f.stem not in NOT_SNAPSHOTS)
    numbers = dict(zip(files, _numbers([file.stem for file in files]), strict=True))
    read: list[Snapshot] = []
    shapes: dict[str, torch.Size] = {}
    for file in files:
        content = read_checkpoint(file)
        here = {name: tensor.shape for name, tensor in content.state_dict.items()}
        shapes = shapes or here
        _refuse_other_architecture(file, here, files[0], with_model_keys(shapes, set(here)))
        read.append(Snapshot(file, _epoch(content, numbers[file]), state_dict_sha256(content.state_dict)))
    read.sort(key=lambda snapshot: (snapshot.epoch, snapshot.path.stem == "final"))
    first = {snapshot.sha256: snapshot for snapshot in reversed(read)}
    last = read[-1:]  # w_T, also if the run returned to previous weights
    different = [s for s in read if s is first[s.sha256] and s.sha256 != last[0].sha256] + last
    if len(different) < 2:
        raise ValueError(
            f"{folder} holds {len(different)} different snapshots of {', '.join(SUFFIXES)}, expected at least two; "
            "train with --snapshots 1, or give another folder"
        )
    return different


def last(folder: Path) -> Path:
    """The checkpoint a run folder stands for: its `final.pt`, else its last snapshot."""
    final = folder / FINAL
    return final if final.exists() else of_run(folder)[-1].path


def load_snapshot(model: torch.nn.Module, snapshot: Snapshot, *, allow_missing: bool = False) -> None:
    """Load a snapshot's weights and buffers into the model."""
    load_into(model, read_checkpoint(snapshot.path), allow_missing=allow_missing)


def _refuse_other_architecture(
    file: Path, found: Mapping[str, torch.Size], first: Path, expected: Mapping[str, torch.Size]
) -> None:
    """Refuse a snapshot whose tensors differ in name or shape from the first one's; names the first difference."""
    for name in [*expected, *(name for name in found if name not in expected)]:
        if found.get(name) != expected.get(name):
            got, wanted = (str(tuple(s[name])) if name in s else "absent" for s in (found, expected))
            raise ValueError(
                f"{file} has another architecture than {first.name}: {name} is {got}, expected {wanted}; "
                "keep checkpoints of one model in a folder"
            )


def _numbers(stems: Sequence[str]) -> list[float | None]:
    """The number in each file name that orders the files: after a word such as `epoch`, else the last that differs."""
    named = [re.search(rf"(?:{PROGRESS})[-_=]?({NUMBER})", stem, re.IGNORECASE) for stem in stems]
    all_of = [[float(number) for number in re.findall(NUMBER, stem)] for stem in stems]
    numbered = [numbers for numbers in all_of if numbers]
    counts = {len(numbers) for numbers in numbered}
    columns = range(counts.pop() if len(counts) == 1 else 0)
    column = max((i for i in columns if len({numbers[i] for numbers in numbered}) > 1), default=-1)
    return [
        float(match[1]) if match else (numbers[column] if numbers else None)
        for match, numbers in zip(named, all_of, strict=True)
    ]


def _epoch(content: Checkpoint, number: float | None) -> float:
    if math.isfinite(content.epoch):
        return content.epoch
    if number is None:
        number = {"init": 0.0, "initial": 0.0, "final": math.inf, "last": math.inf}.get(content.path.stem)
    if number is None:
        raise ValueError(f"{content.path} stores no epoch and has no number in its name; rename it, e.g. epoch_010.pt")
    return number

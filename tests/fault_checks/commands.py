"""Start commands in a folder, wait for units of theirs, and compare the files that they write."""

import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked  # a command that need not import torch first starts in a hundredth of the time
import numpy as np
import torch

from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.results import group as groups
from landscape.results import hdf5_file, unmerged_journals
from landscape.results.journal import NotAJournal, records_of

Unit = tuple[str, tuple[int, ...]]  # the digest of its result, and its index
Process = subprocess.Popen[str] | forked.Popen
MAKE = ["train", "resnet_demo", "--model-arg", "width=8", "--data", "digits", "--epochs", "0"]
SURFACE = ["surface", "final.pt", "--samples", "16", "--out", "results.h5", "--resolution"]
QUICK, LONG = [*SURFACE, "7"], [*SURFACE, "17"]  # 49 and 289 units


def checkpoint(
    folder: Path, name: str = "resnet_demo", snapshots: tuple[str, ...] = ("final",), **arguments: Any
) -> Path:
    """An untrained network of few weights, as snapshots of a run on digits."""
    about: dict[str, Any] = {"classes": 10, "image_size": 16, **arguments}
    for seed, snapshot in enumerate(snapshots):
        torch.manual_seed(seed)
        write_checkpoint(
            folder / f"{snapshot}.pt", model=name, model_args=about, recipe={"crop": 2, "flip": True},
            data={"name": "digits"}, epoch=float(seed), metrics={}, seed=0,
            state_dict=models.build(name, **about).state_dict(),
        )  # fmt: skip
    return folder / f"{snapshots[-1]}.pt"


def start(words: list[str], folder: Path, program: str = "", **how: Any) -> Process:
    """A command in a folder, or a program that is given its words; what `Popen` shall do besides, in a new process."""
    command = ["-c", program, *words] if program else ["-m", "landscape", *words]
    if not how:
        return forked.Popen(command, cwd=folder)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, **pipes, **how)


def ended(process: Process, seconds: float = 500) -> tuple[int, str]:
    """Its exit code and its last line."""
    _, err = process.communicate(timeout=seconds)
    return process.returncode, (err.strip().splitlines() or [""])[-1]


def content(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Every result of a file, by its digest: the label is that of the folder."""
    with hdf5_file.reading(path) as file:
        return {name.rpartition("-")[2]: groups.arrays(group) for name, group in groups.results_in(file)}


def same(mine: Path, theirs: Path) -> bool:
    """Whether two files hold the same numbers."""
    a, b = content(mine), content(theirs)
    return a.keys() == b.keys() and all(
        np.array_equal(a[name][key], b[name][key], equal_nan=b[name][key].dtype.kind == "f")
        for name in b
        for key in b[name]
    )


def units(path: Path) -> set[Unit]:
    """Finished units of all results, those in the journals beside the file included."""
    found: set[Unit] = set()
    for digest, arrays in (content(path) if path.exists() else {}).items():
        found |= {(digest, tuple(index)) for index in np.argwhere(arrays["done"] == 1).tolist()}
    for journal in unmerged_journals.journals(path):
        with suppress(NotAJournal):  # not begun, or removed by now
            digest = journal.name.rpartition("-")[2]
            found |= {(digest, tuple(r.data["index"])) for r in records_of(journal) if "index" in r.data}
    return found


def whole(folder: Path, words: list[str]) -> Path:
    """The results of the same command without a fault, measured once for all checks, in a folder beside theirs."""
    other = folder.parent / f"whole-{words[-1]}"
    if not other.exists():
        other.mkdir()
        shutil.copy(folder / "final.pt", other)
        code, said = ended(start(words, other))
        assert code == 0, said
    return other / "results.h5"


def expect(*facts: tuple[bool, str]) -> str:
    """What is not as it should be."""
    return "; ".join(text for holds, text in facts if not holds)


def held(path: Path) -> int:
    """How many units are finished, those in the journals beside the file included."""
    return len(units(path))


def running(words: list[str], folder: Path, units: int, **how: Any) -> Process:
    """A command in a folder that has finished so many units."""
    process, until = start(words, folder, **how), time.monotonic() + 200
    while held(folder / "results.h5") < units:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "no units"
        time.sleep(0.01)
    return process


def beside(folder: Path) -> set[str]:
    """Files that a command left beside its results: none after a run that has ended by itself."""
    return {file.name for file in folder.iterdir() if file.name.lstrip(".").startswith("results.h5.")}

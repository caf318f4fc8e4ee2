"""Find the checkpoints that a folder stands for, and the snapshots of a training run in order of epoch."""

import difflib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch

from landscape.checkpoints import raw_files, state_dict_loading
from landscape.checkpoints.checkpoint import Checkpoint, read_checkpoint, state_dict_sha256
from landscape.checkpoints.containers import Weights
from landscape.checkpoints.file_names import (
    FINAL,
    OF_TRAINER,
    SUFFIXES,
    NamePlace,
    bare_numbers,
    model_hint,
    natural_key,
    place_of,
    stem_of,
    without_companions,
)

SHOWN = 8  # files that a message names
_log = logging.getLogger(__name__)


class NotOneRun(ValueError):
    """The checkpoints of a folder are not recognisably the snapshots of one training run."""


@dataclass(frozen=True)
class Snapshot:
    """One file of a run."""

    path: Path
    epoch: float  # as stored (a float, init 0), else the number in the file name; NaN for warm-up without either
    sha256: str  # of its weights
    weights: Weights = "raw"  # how the file is read, as in `read_checkpoint`
    trust_pickle: bool = False
    # what a file's weights are in the model that is measured: under its names, or merged into a base
    in_model: Callable[[Checkpoint], Checkpoint] | None = field(default=None, repr=False, compare=False)

    def read(self) -> Checkpoint:
        """Read the file again, with the weights of the model that is measured."""
        stored = read_checkpoint(self.path, weights=self.weights, trust_pickle=self.trust_pickle)
        return stored if self.in_model is None else self.in_model(stored)


@dataclass(frozen=True)
class _Found:
    """A snapshot whose place in the run is not decided yet."""

    snapshot: Snapshot
    place: NamePlace
    bare: float | None  # a number in the name that no word explains
    shapes: Mapping[str, torch.Size] = field(repr=False)

    @property
    def order(self) -> tuple[float, ...] | None:
        """The key that sorts the snapshots of a run; None where neither the file nor its name says it."""
        # init is before, and final behind, any other file of the same epoch; warm-up follows on epoch 0
        rank = {"init": 0.0, "warmup": 2.0, "final": 3.0}.get(self.place.stage, 1.0)
        by_stage = {"init": 0.0, "warmup": 0.0, "final": math.inf}.get(self.place.stage)
        if math.isfinite(self.snapshot.epoch):
            first: float | None = self.snapshot.epoch
        else:
            first = self.place.numbers[0] if self.place.numbers else self.bare if by_stage is None else by_stage
        return None if first is None else (first, rank, *self.place.numbers)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, by name with numbers by value: files and Hugging Face folders, or the folder itself.

    Left out are moving averages, the state to resume from, and the shards of one checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no run folder at {folder}; give the folder that holds the snapshots")
    inside = sorted(folder.iterdir(), key=natural_key)
    folders = [path for path in inside if path.is_dir() and raw_files.holds_weights(path)]
    if raw_files.holds_weights(folder):
        return [*folders, folder]
    shards = {shard for index in inside if index.name.endswith(raw_files.INDEX) for shard in raw_files.files_of(index)}
    files = [path for path in inside if path.is_file() and path.name.lower().endswith(SUFFIXES) and path not in shards]
    return [*folders, *without_companions(files)]


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to, itself where it is a folder that holds others."""
    alone = (
        raw_files.holds_weights(checkpoint) and len(checkpoints_in(checkpoint)) == 1 if checkpoint.is_dir() else True
    )
    return checkpoint.parent if alone else checkpoint


def of_run(run: Path | Sequence[Path], *, weights: Weights = "raw", trust_pickle: bool = False) -> list[Snapshot]:
    """All different snapshots of a run, in order; files with equal weights count once, the last is w_T.

    Args:
        run: the run's folder, whose files must be recognisable as one run: of one architecture, with different epochs
            that they store or that their names say. Where they are not, the run is the files with the trainer's names
            (init, warmup, epoch_010, final), if there are several. Or the files in order; those in alphabetical order,
            as a shell lists them, are ordered by epoch or by the numbers in their names where all have one.
        weights: as for `read_checkpoint`, of every file.
        trust_pickle: as for `read_checkpoint`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the files of a folder are not recognisable as one run (`NotOneRun`), have different architectures,
            or are fewer than two different snapshots.
    """
    if not isinstance(run, Path):
        files = without_companions(run)
        return _snapshots(run, files, Path(files[0].parent if files else ""), weights, trust_pickle)
    files = checkpoints_in(run)
    try:
        return _snapshots(run, files, run, weights, trust_pickle)
    except ValueError:
        own = [file for file in files if OF_TRAINER.fullmatch(stem_of(file))]
        if not 2 <= len(own) < len(files):
            raise
        found = _snapshots(run, own, run, weights, trust_pickle)
        others = ", ".join(file.name for file in files if file not in own)
        _log.info("%s: the run is the files with the trainer's names, without %s", run, others)
        return found


def _snapshots(
    run: Path | Sequence[Path], files: Sequence[Path], where: Path, weights: Weights, trust_pickle: bool
) -> list[Snapshot]:
    places = [NamePlace(stage="final") if file == run else place_of(file) for file in files]
    named = not isinstance(run, Path)
    if not named:
        _refuse_other_trainings(where, files, places)
    found = _read(where, files, places, named=named, weights=weights, trust_pickle=trust_pickle)
    ordered = (_as_named(found) if named else None) or _by_epoch(where, found)
    different = _different([_with_epoch(item) for item in ordered])
    if len(different) < 2:
        raise NotOneRun(
            f"{where} holds {len(different)} different snapshots of {', '.join(SUFFIXES)}, expected at least two; "
            "write some by landscape train --snapshots 1, or give another folder"
        )
    return different


def same_architecture(one: Path, other: Path, *, weights: Weights = "raw", trust_pickle: bool = False) -> bool:
    """Whether two checkpoints hold tensors of equal names and shapes, whatever wrappers are in the names."""
    states = [read_checkpoint(path, weights=weights, trust_pickle=trust_pickle).state_dict for path in (one, other)]
    first, second = ({name: tensor.shape for name, tensor in state.items()} for state in states)
    return state_dict_loading.with_model_keys(first, set(second)) == second


def load_snapshot(model: torch.nn.Module, snapshot: Snapshot, *, allow_missing: bool = False) -> None:
    """Load a snapshot's weights and buffers into the model."""
    state_dict_loading.load_into(model, snapshot.read(), allow_missing=allow_missing)


def command_files(folder: Path, files: Sequence[Path]) -> str:
    """Words of a command line that name all checkpoints of a folder."""
    endings = dict.fromkeys(next((s for s in SUFFIXES if file.name.lower().endswith(s)), "") for file in files)
    return " ".join(f"{folder}/*{ending}" for ending in endings)


def _read(
    folder: Path,
    files: Sequence[Path],
    places: Sequence[NamePlace],
    *,
    named: bool,
    weights: Weights,
    trust_pickle: bool,
) -> list[_Found]:
    """Read every file, and check that all have the same architecture."""
    in_run = named or any(place.known and place.stage != "best" for place in places)  # else a number may be a seed
    numbers = bare_numbers([stem_of(file) for file in files]) if in_run else [None] * len(files)
    found: list[_Found] = []
    for file, place, number in zip(files, places, numbers, strict=True):
        content = read_checkpoint(file, weights=weights, trust_pickle=trust_pickle)
        if not in_run and not place.known and len(files) > 1 and not math.isfinite(content.epoch):
            reason = "stores no epoch and its name says none (a number alone may be a seed)"
            raise _not_one_run(folder, files, f"{file.name} {reason}")
        shapes = {name: tensor.shape for name, tensor in content.state_dict.items()}
        expected = state_dict_loading.with_model_keys(found[0].shapes if found else shapes, set(shapes))
        _refuse_other_architecture(file, shapes, files[0], expected)
        snapshot = Snapshot(file, content.epoch, state_dict_sha256(content.state_dict), weights, trust_pickle)
        found.append(_Found(snapshot, place, number, shapes))
    return found


def _refuse_other_trainings(folder: Path, files: Sequence[Path], places: Sequence[NamePlace]) -> None:
    """Refuse files whose names tell of several trainings, before any of them is read."""
    trainings = sorted({place.training for place in places if place.training})
    if len(trainings) > 1:
        words = ", ".join(f"{word} {number}" for training in trainings[:2] for word, number in training)
        raise _not_one_run(folder, files, f"their names say {words}")
    unknown = {place.rest: file.name for file, place in zip(files, places, strict=True) if not place.known}
    if len(unknown) > 1:
        first, second = list(unknown.values())[:2]
        raise _not_one_run(folder, files, f"the names {first} and {second} differ and say no epoch or step")


def _not_one_run(folder: Path, files: Sequence[Path], reason: str) -> NotOneRun:
    return NotOneRun(
        f"the {len(files)} checkpoints in {folder} are not recognisably one run: {reason}; if they are, rename them, "
        f"e.g. epoch_010.pt, or name them in order: landscape trajectory {command_files(folder, files)}"
    )


def _refuse_other_architecture(
    file: Path, found: Mapping[str, torch.Size], first: Path, expected: Mapping[str, torch.Size]
) -> None:
    """Refuse a snapshot whose tensors differ in name or shape from the first one's; names the first difference."""
    for name in [*expected, *(name for name in found if name not in expected)]:
        if found.get(name) != expected.get(name):
            got, wanted = (str(tuple(s[name])) if name in s else "absent" for s in (found, expected))
            raise NotOneRun(
                f"{file} has another architecture than {first.name}: {name} is {got}, expected {wanted}; "
                "keep checkpoints of one model in a folder"
            )


def _as_named(found: list[_Found]) -> list[_Found] | None:
    """Files that the user named, in their order; None if that is alphabetical, as a shell's, and epochs say another."""
    names = [str(item.snapshot.path) for item in found]
    keys = [item.order for item in found]
    known = [key for key in keys if key is not None]
    if names != sorted(names) or known == sorted(known) or len(set(known)) < len(known):
        return found
    return None


def _by_epoch(folder: Path, found: Sequence[_Found]) -> list[_Found]:
    """The files of a run ordered by epoch; a best one of unknown epoch is left out."""
    files = [item.snapshot.path for item in found]
    known = {item.snapshot.sha256 for item in found if item.order is not None}
    unknown = [item for item in found if item.order is None and item.snapshot.sha256 not in known]
    for item in unknown:
        path = item.snapshot.path
        if item.place.stage == "best" and len(known) > 1:
            _log.info("%s is left out of the run: its epoch is unknown", path)
        elif len(files) == 1:
            raise ValueError(f"{path} stores no epoch and has no number in its name; rename it, e.g. epoch_010.pt")
        else:
            raise _not_one_run(folder, files, f"{path.name} stores no epoch and its name says none")
    ordered = sorted((item for item in found if item.order is not None), key=lambda item: item.order or ())
    for one, other in pairwise(ordered):
        if one.order == other.order and one.snapshot.sha256 != other.snapshot.sha256:
            both = f"{one.snapshot.path.name} and {other.snapshot.path.name} have the same epoch"
            raise _not_one_run(folder, files, both)
    return ordered


def _with_epoch(item: _Found) -> Snapshot:
    """The snapshot with its epoch: stored, or in its name; NaN where only its place is known."""
    if math.isfinite(item.snapshot.epoch) or item.order is None or item.place.stage == "warmup":
        return item.snapshot
    return replace(item.snapshot, epoch=item.order[0])


def _different(ordered: Sequence[Snapshot]) -> list[Snapshot]:
    """Snapshots of equal weights once, at the first of their places; the last one is w_T also where a run returned."""
    first = {snapshot.sha256: snapshot for snapshot in reversed(ordered)}
    last = list(ordered[-1:])
    return [s for s in ordered if s is first[s.sha256] and s.sha256 != last[0].sha256] + last


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

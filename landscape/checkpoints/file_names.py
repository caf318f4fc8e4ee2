"""Read what the name of a checkpoint file says: its stem, a label, and the file's place in a run."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from landscape.checkpoints import raw_files

FINAL = "final.pt"  # the last weights of a run of the trainer
FINAL_EMA = "final_ema.pt"  # their moving average, a separate checkpoint
DECODER = "final_decoder.pt"  # those of a masked-image encoder with its decoder, likewise
# Endings of checkpoint files, the longer ones first; `.t7` is torch.save's by the convention of older PyTorch code.
SUFFIXES = (".pth.tar", ".pt.tar", ".pt", ".pth", ".t7", ".ckpt", ".safetensors")
OF_TRAINER = re.compile(r"init|warmup|epoch_\d+|final")  # what it calls the snapshots of a run
NUMBER = r"\d+(?:\.\d+)?"
# Words in front of a snapshot's number, and words that replace it.
PROGRESS = re.compile(
    rf"(?:epochs?|(?<![a-z])ep|steps?|iterations?|iters?|checkpoints?|ckpt|snapshots?|snap)[-_=]?({NUMBER})"
)
STAGES = {  # the first that a name has counts: kaiming_init_final is no initial state
    "final": re.compile(r"(?<![a-z])(?:final|last|latest)(?![a-z])"),
    "best": re.compile(r"(?<![a-z])best(?![a-z])"),
    "init": re.compile(r"(?<![a-z])(?:init|initial|initiali[sz]ed|initiali[sz]ation|untrained)(?![a-z])"),
    "warmup": re.compile(r"(?<![a-z])warm[-_ ]?up(?![a-z])"),
}
# What tells independent trainings apart: files of one run share it.
TRAINING = re.compile(
    rf"(?<![a-z])(seeds?|s|rng|runs?|folds?|trials?|repeats?|rep|replicas?|members?|lr|wd)[-_=]?({NUMBER})"
)
# Files beside checkpoints: the state to resume from, the trainer's moving average, and parts of other training scripts.
COMPANION = re.compile(
    r"resume|final_ema|final_decoder|(.*[-_.])?(optim|optimizer|optimizer_state|scheduler|scaler|rng_state(_\d+)?|training_args)"
)


@dataclass(frozen=True)
class NamePlace:
    """Where a name puts a file in a run."""

    numbers: tuple[float, ...] = ()  # after words such as epoch and step, in their order in the name
    stage: str = ""  # without such a number: init, warmup, final or best; "" if the name says none
    training: tuple[tuple[str, str], ...] = ()  # words and numbers of the training, such as ("seed", "3")
    rest: str = ""  # the name with # for every number

    @property
    def known(self) -> bool:
        """Whether the name says that the file is a snapshot of a run."""
        return bool(self.numbers or self.stage)


def stem_of(path: Path) -> str:
    """A file's name without the ending of a checkpoint, also one of two parts (`.pth.tar`); a folder's name."""
    ending = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")
    return path.name[: -len(ending)] if ending else path.name if path.is_dir() else path.stem


def place_of(path: Path) -> NamePlace:
    """What a file's name says about its place in a run."""
    name = stem_of(path).lower()
    numbers = tuple(float(number) for number in PROGRESS.findall(name))
    stage = next((stage for stage, words in STAGES.items() if words.search(name)), "") if not numbers else ""
    return NamePlace(numbers, stage, tuple(TRAINING.findall(name)), re.sub(NUMBER, "#", name))


def without_companions(files: Sequence[Path]) -> list[Path]:
    """The files that are snapshots by their names: no optimizer states, and no `X_ema` beside `X`."""
    stems = {stem_of(file) for file in files}
    averages = {f"{stem}{mark}ema" for stem in stems for mark in "-_."}
    return [file for file in files if not COMPANION.fullmatch(stem := stem_of(file)) and stem not in averages]


def natural_key(path: Path) -> list[tuple[int, float, str]]:
    """The key that sorts names with the numbers in them by value."""
    parts = re.split(r"(\d+)", path.name.lower())
    return [(0, float(part), "") if part.isdigit() else (1, 0.0, part) for part in parts if part]


def bare_numbers(stems: Sequence[str]) -> list[float | None]:
    """The last number in each name that differs among them, if all names have equally many; else None."""
    all_of = [[float(number) for number in re.findall(NUMBER, stem)] for stem in stems]
    numbered = [numbers for numbers in all_of if numbers]
    counts = {len(numbers) for numbers in numbered}
    columns = range(counts.pop() if len(counts) == 1 else 0)
    column = max((i for i in columns if len({numbers[i] for numbers in numbered}) > 1), default=-1)
    return [numbers[column] if numbers and columns else None for numbers in all_of]


def model_hint(path: Path) -> str:
    """For messages, how to give a model by name, if the path looks like one; else ""."""
    return f"; a model is given with --model {path}" if ":" in str(path) else ""


def label_of(path: Path) -> str:
    """The default label: for `final.pt` the name of the run folder, for other snapshots folder and stem."""
    return "-".join(_parts(path)[-_label_length(path) :])


def labels_of(paths: Sequence[Path]) -> list[str]:
    """A label for each of several checkpoints; equal ones are preceded by the folders in which the paths differ."""
    labels = [label_of(path) for path in paths]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [i for i, other in enumerate(labels) if other == label]
        parts = {i: _parts(paths[i]) for i in alike}
        distinct, longest = len({tuple(own) for own in parts.values()}), max(map(len, parts.values()))
        for more in range(1, longest):
            found = {i: "-".join(own[-_label_length(paths[i]) - more :]) for i, own in parts.items()}
            if len(set(found.values())) == distinct:
                labels = [found.get(i, other) for i, other in enumerate(labels)]
                break
    return labels


def _parts(path: Path) -> list[str]:
    """Folders and stem of a path; without the file's name where it says nothing beside its folder's."""
    folders = [part for part in path.resolve().parts[:-1] if part != path.anchor and part != "/"]
    return folders if path.name in (FINAL, *raw_files.IN_FOLDER) and not path.is_dir() else [*folders, stem_of(path)]


def _label_length(path: Path) -> int:
    of_trainer = path.name in (FINAL_EMA, DECODER) or re.fullmatch(r"init|warmup|epoch_\d+", stem_of(path))
    return 2 if of_trainer and not path.is_dir() else 1


def huggingface_folder(name: str) -> Path:
    """Find a folder written by transformers' `save_pretrained`: the path itself, or the hub client's cached copy.

    The cache is read without the client, whose import takes a second and whose failure offline takes twenty.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: the folder has no `config.json`.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _in_cache(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"hf:{name}: {folder} has no config.json; expected a folder that save_pretrained wrote")
    return folder


def _in_cache(name: str) -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise FileNotFoundError(
            f"hf:{name}: no such folder, and nothing of that name in {cache}; nothing is downloaded: fetch it "
            f"once with 'hf download {name}', or give a folder with config.json"
        ) from None

"""Load image folders with one folder per class, up to the size of ImageNet."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from landscape.data import dataset, decoding
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Resize
from landscape.data.sampling import Samples, Split, subset

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp"))
SPLITS = {"train": ("train",), "test": ("test", "val")}  # split -> names of its folder, in order of preference
_log = logging.getLogger(__name__)


def load(
    name: str, *, split: Split, samples: Samples, image_size: int | None, resize: Resize | None, ordered: bool = False
) -> dataset.Images:
    """The first `samples` images of a folder of class folders, in the class-balanced order (`ordered`: by name).

    FOLDER/train and FOLDER/test (or val) are used if they hold class folders; else FOLDER itself for both splits.
    Classes are the class folders of both splits together, in name order. Without `resize`, the shorter side is brought
    to `image_size` (bilinear, antialiased) and the centre is cropped; images of that size are not resampled. Files are
    listed without being opened, and only the selected images are decoded. Without a size: that of the images if all
    selected ones are square, equal and at most 64 pixels wide, else 224.

    Raises:
        FileNotFoundError: there are no class folders, no images, or not this split.
        ValueError: an image cannot be decoded, or the images do not fit into memory.
    """
    root = Path(name).expanduser()
    folder, parts = _part(root, split)
    classes = sorted({entry for part in parts for entry in _folders(part)})
    _note_order(root, classes)
    entries = [f"{folder}/{entry}" for entry in _folders(folder)]
    with ThreadPoolExecutor() as pool:  # listing a folder on a network disk takes time
        listed = list(pool.map(pictures, entries))
    numbers = [classes.index(os.path.basename(entry)) for entry in entries]
    targets = np.repeat(np.array(numbers, np.int64), [len(files) for files in listed])
    if not len(targets):
        raise FileNotFoundError(
            f"{folder} holds no images in class folders; expected {folder}/CLASS/*.png (or jpg, webp, bmp)"
        )
    if empty := [os.path.basename(entry) for entry, files in zip(entries, listed, strict=True) if not files]:
        _log.warning("note: %s: no images in %s, which count as classes; remove them if they are none", folder, empty)
    rows = subset(targets, samples, ordered=ordered)
    starts = np.cumsum([0, *(len(files) for files in listed)])
    places = np.searchsorted(starts, rows, side="right") - 1  # folder of each selected row
    paths = [f"{entries[i]}/{listed[i][row - starts[i]]}" for i, row in zip(places, rows, strict=True)]
    chosen = partial(map, decoding.Picture, range(len(paths)), paths, paths)
    size = image_size or decoding.common_size(decoding.sizes(chosen()))
    inputs = decoding.decoded(chosen(), name=name, count=len(paths), of=len(targets), size=size, resize=resize)
    labels = torch.from_numpy(targets[rows])
    return dataset.Images(
        torch.from_numpy(inputs), labels, name, len(classes), size, IMAGENET_MEAN, IMAGENET_STD,
        one_part=folder == root, available=len(targets),
    )  # fmt: skip


def _part(root: Path, split: str) -> tuple[Path, list[Path]]:
    """The folder of this split, and all folders that define the classes."""
    existing = {part: root / part for names in SPLITS.values() for part in names if _folders(root / part)}
    if not existing:
        return root, [root]
    for part in SPLITS[split]:
        if part in existing:
            return existing[part], list(existing.values())
    raise FileNotFoundError(
        f"{root} has {', '.join(existing)} but no {' or '.join(SPLITS[split])} for the {split} split; "
        "give the other split, or the folder of class folders itself"
    )


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def is_picture(name: str) -> bool:
    """Whether a file is a picture by its name; macOS writes `._NAME` beside NAME, which is none."""
    return os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")


def _note_order(root: Path, classes: list[str]) -> None:
    """Say that the order of the names is not that of the numbers, if all classes are called by numbers."""
    numbers = [int(name) for name in classes if name.isdecimal()]
    if len(numbers) == len(classes) and numbers != sorted(numbers):
        _log.warning(
            "note: the classes of %s are numbered in the order of their names (%s), as torchvision does, not of their "
            "numbers; write them with leading zeros (%s) if the network was trained with class %s as number %s",
            root, ", ".join(classes[:3]), "0".zfill(len(str(max(numbers)))), max(numbers), max(numbers),
        )  # fmt: skip


def pictures(folder: str) -> list[str]:
    """Paths of all pictures below a folder, relative to it, in name order; linked folders are not entered.

    The directory entries say what is a file, so that no file is opened or queried.
    """
    found: list[str] = []
    waiting = ["/"]  # the last one is next; a folder ends with /
    while waiting:
        place = waiting.pop()
        if not place.endswith("/"):
            found.append(place[1:])
            continue
        with os.scandir(folder + place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{place}{entry.name}/")
                elif is_picture(entry.name) and entry.is_file():
                    waiting.append(place + entry.name)
    return found

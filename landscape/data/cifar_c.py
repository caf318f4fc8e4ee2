"""Load CIFAR-10-C and CIFAR-100-C, the CIFAR test images under common corruptions (Hendrycks & Dietterich 2019)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.data import cifar
from landscape.data.dataset import Images
from landscape.data.file_contents import rows_sha256
from landscape.data.numpy_files import mapped
from landscape.data.sampling import Samples, subset
from landscape.options import OptionError

SEVERITIES = 5
FOLDERS = {"cifar10-c": ("CIFAR-10-C", "cifar10"), "cifar100-c": ("CIFAR-100-C", "cifar100")}
LABELS = "labels"


def knows(name: str) -> bool:
    """Whether a name starts with one of these data sets."""
    return name.partition(":")[0] in FOLDERS


def folder_of(clean: str, root: Path | None) -> Path | None:
    """The folder of the corrupted test images of a data set under a data root; None where there is none."""
    place = next((place for place, name in FOLDERS.values() if name == clean), None)
    found = cifar.data_root(root) / place if place else None
    return found if found is not None and names_in(found) else None


def names_in(folder: Path) -> tuple[str, ...]:
    """The corruptions, or perturbations, whose files a folder holds; none if it is no folder."""
    return tuple(sorted(path.stem for path in folder.glob("*.npy") if path.stem != LABELS))


def load(name: str, *, root: Path | None, split: str, samples: Samples) -> Images:
    """One corruption at one severity: `cifar10-c:CORRUPTION:SEVERITY`, severity 1 to 5.

    `ROOT/CIFAR-10-C/CORRUPTION.npy` holds the test images once per severity, (5 N, 32, 32, 3) uint8, N 10,000;
    `labels.npy` their classes (5 N,). Only the selected rows are read. Row i is test image i, so that the
    class-balanced order is that of the clean test split.

    Raises:
        OptionError: the severity is out of range, or the split is train, which has no corruptions.
        FileNotFoundError: there is no such folder or corruption; names the existing ones.
        ValueError: the files do not match.
    """
    short, *words = name.split(":")
    if len(words) != 2 or not all(words):
        raise OptionError(f"--data {name} is incomplete; give {short}:CORRUPTION:SEVERITY such as {short}:fog:3")
    if words[1] not in map(str, range(1, SEVERITIES + 1)):
        raise OptionError(f"--data {name}: the severity must be 1 to {SEVERITIES}, got {words[1]}")
    corruption, severity = words[0], int(words[1])
    if split != "test":
        raise OptionError(f"--data {name} has test images only; give --split test")
    place, clean = FOLDERS[short]
    release = cifar.RELEASES[clean]
    folder = cifar.data_root(root) / place
    images, labels = _array(folder, corruption, name), _array(folder, "labels", name)
    each, rest = divmod(len(images), SEVERITIES)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or rest or labels.shape != (len(images),):
        raise ValueError(
            f"{folder}/{corruption}.npy is {images.dtype} {images.shape} and labels.npy {labels.shape}; "
            "expected uint8 (50000, 32, 32, 3) and (50000,); download them again"
        )
    of_severity = slice(each * (severity - 1), each * severity)
    targets = np.array(labels[of_severity], np.int64)
    if not each or targets.min() < 0 or targets.max() >= release.classes:
        raise ValueError(f"{folder}/labels.npy has other classes than 0 to {release.classes - 1}; download it again")
    rows = subset(targets, samples)
    pixels = np.empty((len(rows), 3, 32, 32), np.uint8)
    for position in np.argsort(rows):  # in the order of the file
        pixels[position] = images[of_severity][rows[position]].transpose(2, 0, 1)
    inputs, labels_of_rows = torch.from_numpy(pixels), torch.from_numpy(targets[rows])
    return Images(inputs, labels_of_rows, name, release.classes, 32, release.mean, release.std)


def content(folder: Path, corruption: str, severities: Sequence[int], samples: Samples) -> list[str]:
    """Digests of the images and classes of one corruption that `load` reads.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    name = f"{folder.name.lower()}:{corruption}"
    images, labels = _array(folder, corruption, name), _array(folder, LABELS, name)
    each = len(images) // SEVERITIES
    rows = [
        each * (severity - 1) + subset(np.array(labels[each * (severity - 1) : each * severity], np.int64), samples)
        for severity in severities
    ]
    return [rows_sha256(folder / f"{stem}.npy", np.concatenate(rows)) for stem in (corruption, LABELS)]


def _array(folder: Path, stem: str, name: str) -> Any:
    path = folder / f"{stem}.npy"
    if not path.is_file():
        there = sorted(found.stem for found in folder.glob("*.npy") if found.stem != "labels")
        known = f"there are {', '.join(there)}" if there else "the folder is missing or empty"
        raise FileNotFoundError(
            f"--data {name}: there is no {path} ({known}); "
            f"unpack {folder.name}.tar under --data-root, or give an existing one"
        )
    return mapped(path)

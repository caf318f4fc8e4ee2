"""Pictures whose shape and texture are of different classes: cue-conflict folders, or made of pairs of images.

The pictures of Geirhos et al. (2019, arXiv 1811.12231) are named `cat1-elephant2.png`: the shape of a cat, the texture
of an elephant.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from landscape.data.image_folder import pictures
from landscape.options import OptionError

PATTERN = re.compile(r"(?P<shape>[A-Za-z_ ]{1,60})\d*-(?P<texture>[A-Za-z_ ]{1,60})\d*")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MOST_BYTES = 1 << 20  # of a mapping


@dataclass(frozen=True)
class Cue:
    """One picture of a folder."""

    path: Path
    shape: str  # category
    texture: str


def listed(folder: Path) -> list[Cue]:
    """The pictures below a folder, in name order, without those whose shape and texture are of one category.

    Raises:
        OptionError: it is no folder, or has no pictures.
        ValueError: the name of a picture does not say shape and texture, or none has a conflict.
    """
    files = sorted(folder / name for name in pictures(str(folder))) if folder.is_dir() else []
    if not files:
        raise OptionError(f"--cues {folder} holds no pictures; give a folder with files such as cat1-elephant2.png")
    found = []
    for path in files:
        match = PATTERN.fullmatch(path.stem)
        if match is None:
            raise ValueError(f"{path} does not say its shape and texture; expected a name such as cat1-elephant2.png")
        found.append(Cue(path, match["shape"], match["texture"]))
    conflicts = [cue for cue in found if cue.shape != cue.texture]
    if not conflicts:
        raise ValueError(f"{folder} has no picture whose shape and texture differ; expected cat1-elephant2.png, say")
    return conflicts


def recombined(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Phase of every image with the amplitude of the next one of another class: pictures, shape and texture classes.

    Images (N, 3, H, W) uint8. The phase of the Fourier transform keeps outlines, the amplitude the statistics of
    textures (Chen et al. 2021, arXiv 2108.08487). No randomness: the partner follows from the order of the images.

    Raises:
        ValueError: all images are of one class.
    """
    labels = targets.tolist()
    partners = []
    for i, label in enumerate(labels):
        other = next((j % len(labels) for j in range(i + 1, i + len(labels)) if labels[j % len(labels)] != label), None)
        if other is None:
            raise ValueError("cue conflicts need images of at least two classes, got one; give more --samples")
        partners.append(other)
    spectra = torch.fft.fft2(images.double())
    mixed = torch.fft.ifft2(spectra[partners].abs() * torch.exp(1j * spectra.angle())).real
    return mixed.clamp(0, 255).round().to(torch.uint8), targets, targets[partners]


def class_names(data: str, classes: int) -> dict[str, list[int]]:
    """Categories of the classes of a data set by their names: CIFAR-10's, or those of class folders; else numbers."""
    folder = Path(data).expanduser()
    names: Sequence[str] = [str(i) for i in range(classes)]
    if data == "cifar10" and classes == len(CIFAR10):
        names = CIFAR10
    elif data and folder.is_dir():
        parts = [part for part in (folder / "train", folder / "test", folder / "val") if part.is_dir()] or [folder]
        found = sorted(
            {path.name for part in parts for path in part.iterdir() if path.is_dir() and path.name[0] != "."}
        )
        names = found if len(found) == classes else names
    return {name: [i] for i, name in enumerate(names)}


def read_mapping(path: Path, classes: int) -> dict[str, list[int]]:
    """Categories of a JSON file, `{"cat": [281, 282], "dog": [151]}`.

    Raises:
        OptionError: there is no such file, or it is something else, or names a class that the model lacks.
    """
    wanted = 'a JSON file such as {"cat": [281, 282], "dog": [151, 152]}'
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise OptionError(f"--mapping {path} is no file of at most {MOST_BYTES} bytes; give {wanted}")
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--mapping {path} is no JSON ({type(error).__name__}); give {wanted}") from None
    valid = isinstance(content, Mapping) and len(content) > 1
    for numbers in content.values() if valid else ():
        whole = isinstance(numbers, list) and numbers and all(type(number) is int for number in numbers)
        valid = bool(valid and whole)
    if not valid:
        raise OptionError(
            f"--mapping {path} must hold at least two categories with lists of class numbers; give {wanted}"
        )
    every = [number for numbers in content.values() for number in numbers]
    if min(every) < 0 or max(every) >= classes:
        raise OptionError(
            f"--mapping {path} names the classes {min(every)} to {max(every)}; the model has 0 to {classes - 1}"
        )
    if len(set(every)) < len(every):
        twice = next(number for number in every if every.count(number) > 1)
        raise OptionError(f"--mapping {path} names class {twice} twice; a class belongs to one category")
    return {str(name): list(numbers) for name, numbers in content.items()}


def matrix_of(categories: Mapping[str, Sequence[int]], classes: int) -> np.ndarray:
    """The average over the classes of every category, (classes, category)."""
    found = np.zeros((classes, len(categories)))
    for i, numbers in enumerate(categories.values()):
        found[list(numbers), i] = 1 / len(numbers)
    return found

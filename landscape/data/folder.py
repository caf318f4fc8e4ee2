"""Image folders: one folder per class, decoded by Pillow."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from landscape.data.images import Images, balanced
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Fit

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp"))
SPLITS = {"train": ("train",), "test": ("test", "val")}  # split -> names of its folder, the first that exists
SMALL = 64  # images up to this side keep their size
DEFAULT_SIZE = 224


def load(
    name: str,
    *,
    split: Literal["train", "test"],
    samples: int | None,
    image_size: int | None,
    fit: Fit | None = None,
) -> Images:
    """The first `samples` images of a folder of class folders, in the class-balanced order.

    FOLDER/train and FOLDER/test (or val) follow the split where they hold class folders; else FOLDER itself
    serves both. Classes are the class folders of all parts together, in name order, so that the parts agree
    on them. Shorter side to `image_size` (bilinear, antialiased), then the centre is cropped; images that are
    that size already are not resampled; `fit` says otherwise. Only the chosen images are decoded. Without a
    size: the images' own if all chosen are square, equal and at most 64 pixels wide, else 224.

    Raises:
        FileNotFoundError: there are no class folders, no images, or not this split.
        ValueError: an image cannot be decoded.
    """
    root = Path(name).expanduser()
    folder, parts = _part(root, split)
    classes = sorted({entry.name for part in parts for entry in _folders(part)})
    paths = [(path, classes.index(entry.name)) for entry in _folders(folder) for path in _pictures(entry)]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no images in class folders; expected {folder}/CLASS/*.png (or jpg, webp, bmp)"
        )
    targets = np.array([target for _, target in paths], dtype=np.int64)
    rows = balanced(targets)[:samples]
    chosen = [paths[row][0] for row in rows]
    size = image_size or _own_size(chosen)
    return Images(
        inputs=_decoded(chosen, size, fit),
        targets=torch.from_numpy(targets[rows]),
        name=name,
        classes=len(classes),
        size=size,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def pixels(image: Image.Image, size: int) -> np.ndarray:
    """A picture as (3, size, size) uint8: shorter side to `size`, centre crop."""
    image = image.convert("RGB")
    if image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR)  # Pillow antialiases when it shrinks
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image).transpose(2, 0, 1)


def own_size(sizes: Iterable[tuple[int, int]]) -> int:
    """The side of pictures that are all square, equal and small; else 224."""
    distinct = set(sizes)
    width, height = next(iter(distinct))
    return width if len(distinct) == 1 and width == height <= SMALL else DEFAULT_SIZE


def _own_size(paths: list[Path]) -> int:
    with ThreadPoolExecutor() as pool:
        return own_size(pool.map(_size, paths))


def _size(path: Path) -> tuple[int, int]:
    with _opened(path) as image:  # reads the header only
        return image.size


def _decoded(paths: list[Path], size: int, fit: Fit | None) -> torch.Tensor:
    inputs = np.empty((len(paths), 3, size, size), np.uint8)

    def decode(row: int) -> None:
        try:
            with _opened(paths[row]) as image:
                inputs[row] = fit.pixels(image, size) if fit else pixels(image, size)
        except Exception as error:  # every decoder raises its own kinds
            raise ValueError(_broken(paths[row], error)) from None

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(paths))):
            pass  # the first error ends the loop and cancels what has not begun
    return torch.from_numpy(inputs)


def _opened(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except Exception as error:  # as above
        raise ValueError(_broken(path, error)) from None


def _broken(path: Path, error: Exception) -> str:
    reason = str(error).removeprefix(f"{path} ")
    return reason if reason.startswith(str(path)) else f"{path} cannot be decoded ({reason}); repair or remove it"


def _part(root: Path, split: str) -> tuple[Path, list[Path]]:
    """The folder of this split, and every folder that has a say in the classes."""
    existing = {part: root / part for names in SPLITS.values() for part in names if _folders(root / part)}
    if not existing:
        return root, [root]
    for part in SPLITS[split]:
        if part in existing:
            return existing[part], list(existing.values())
    raise FileNotFoundError(
        f"{root} has {', '.join(existing)} but no {' or '.join(SPLITS[split])} for the {split} split; "
        "give the other --split, or the folder of class folders itself"
    )


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())

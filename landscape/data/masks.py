"""Targets with a class number per pixel: which count, which images have any; and folders of pictures with masks."""

import logging
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.data import decoding, memory, sampling
from landscape.data.dataset import BatchList, Images, lowest_target, number_of_classes, square_side
from landscape.data.image_folder import SPLITS, is_picture
from landscape.data.numpy_files import mapped
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, rgb

UNLABELLED = -1  # what `with_unlabelled` writes; every negative class number means the same
_log = logging.getLogger(__name__)


def are_masks(targets: Any) -> bool:
    """Whether targets are class numbers of pixels, (N, H, W) integers."""
    return (
        isinstance(targets, Tensor) and targets.ndim == 3 and not (targets.is_floating_point() or targets.is_complex())
    )


def with_class_numbers(data: Images | BatchList) -> Images | BatchList:
    """The data with 0 and 1 for targets that are False and True.

    Raises:
        ValueError: a class number is negative.
    """

    def binary(targets: Any) -> bool:
        return isinstance(targets, Tensor) and targets.dtype == torch.bool

    if (lowest := lowest_target(data)) < 0:
        raise ValueError(
            f"{data.name} has the target {lowest}; expected class numbers from 0 upward; leave such samples out, or "
            "give the loss of these targets with --loss"
        )
    if isinstance(data, Images):
        return replace(data, targets=data.targets.long()) if binary(data.targets) else data
    pairs = [(inputs, targets.long() if binary(targets) else targets) for inputs, targets in data.pairs]
    return replace(data, pairs=pairs) if any(binary(targets) for _, targets in data.pairs) else data


def with_unlabelled(data: Images | BatchList, ignored: int, *, keep: bool = False) -> Images | BatchList:
    """The data with -1 for pixels without a label: those of the class number `ignored`, and negative ones.

    Images without a labelled pixel have no loss: they are left out, unless they are to be kept as frames of a stream.
    Data with other targets are returned as they are. (N, 1, H, W) integers count as (N, H, W).

    Raises:
        ValueError: no image has a labelled pixel, or one cannot be taken out of the mini-batch that a loader formed.
    """
    if isinstance(data, BatchList):
        return _of_batches(data, ignored, keep=keep)
    targets = _flat(data.targets, data.inputs)
    if not are_masks(targets) or data.inputs.ndim < 3:
        return data
    targets = _marked(targets, ignored)
    data = replace(data, targets=targets, classes=int(targets.max()) + 1, counted=True)
    labelled = _has_label(targets)
    count = int(labelled.sum())
    if not count:
        raise ValueError(
            f"no pixel of the {len(data)} targets {tuple(targets.shape)} of {data.name} is labelled: all are {ignored} "
            "or negative; check the masks, or name another number with --ignore-index -1"
        )
    if keep or count == len(data):
        return data
    _log.warning("note: %d of %d images of %s have no labelled pixel and are left out", len(data) - count, len(data),
                 data.name)  # fmt: skip
    return data.take(labelled.nonzero()[:, 0].cpu().numpy())


def _flat(targets: Tensor, inputs: Any) -> Tensor:
    """Targets (N, 1, H, W) of integers as (N, H, W); others as they are."""
    pixels = isinstance(inputs, Tensor) and inputs.ndim == 4 and targets.ndim == 4 and targets.shape[1] == 1
    return targets[:, 0] if pixels and not targets.is_floating_point() else targets


def _marked(targets: Tensor, ignored: int) -> Tensor:
    if targets.dtype in (torch.uint8, torch.bool):
        targets = targets.to(torch.int16)  # which holds negative numbers
    found = (targets < 0) | (targets == ignored)
    return targets.masked_fill(found, UNLABELLED) if bool(found.any()) else targets


def _of_batches(data: BatchList, ignored: int, *, keep: bool) -> BatchList:
    pairs: list[Any] = []
    for inputs, given in data.pairs:
        targets = given
        if isinstance(targets, Tensor) and targets.ndim >= 3:
            targets = _flat(targets, next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs)
        if are_masks(targets):
            targets = _marked(targets, ignored)
        pairs.append((inputs, targets))
    if not any(are_masks(targets) for _, targets in pairs):
        return data
    classes = max((int(t.max()) + 1 for _, t in pairs if are_masks(t)), default=data.classes)
    data = replace(data, pairs=pairs, classes=classes)
    lack = f"no labelled pixel (all are {ignored} or negative)"
    return data if keep else data.labelled([_has_label(targets) for _, targets in pairs], "images", lack)


def _has_label(targets: Any) -> Tensor:
    """Which images have a labelled pixel, (N,); all of those with other targets than masks."""
    if not are_masks(targets):
        return torch.ones(len(targets), dtype=torch.bool)
    labelled: Tensor = (targets >= 0).flatten(1).any(dim=1)
    return labelled


PICTURES = ("images", "frames")
MASKS = ("masks", "annotations")
LABELS = "labels.npy"  # (N,) class numbers, in the order of the pictures
NO_MASK = 255  # of all pixels of a picture that has no mask


def folder_of_split(folder: Path, split: sampling.Split) -> Path | None:
    """The folder of the split, else the folder itself, if it holds pictures beside masks or labels."""
    places = [*(folder / part for part in SPLITS[split]), folder]
    return next((place for place in places if _parts(place)), None)


def load(name: str, *, split: sampling.Split, samples: sampling.Samples, ordered: bool = False) -> Images:
    """Pictures of FOLDER/images (or frames) with FOLDER/masks (or annotations), or with the classes of labels.npy.

    A mask is a picture of one channel, or of palette indices, with stem and size of its picture; its numbers are
    classes, and 255 is none. All pictures have one size, and none is resized, as classes are not. Numbers in the names
    count as numbers, so that frame 10 follows frame 9. `ordered` takes the first pictures, also those without a mask;
    otherwise the seeded order takes those that have one.

    Raises:
        FileNotFoundError: a part is empty.
        ValueError: a file is damaged, or numbers or sizes do not fit.
    """
    place = folder_of_split(Path(name).expanduser(), split)
    assert place is not None
    pictures, masks = _parts(place) or ([], [])
    if not pictures:
        raise FileNotFoundError(f"{place} holds no pictures; expected {place}/{PICTURES[0]}/*.png (or jpg, webp, bmp)")
    if masks:
        by_stem = {mask.stem: mask for mask in masks}
        if not ordered:
            pictures = [picture for picture in pictures if picture.stem in by_stem]
        if not any(picture.stem in by_stem for picture in pictures):
            stem = masks[0].stem
            raise ValueError(f"no mask of {masks[0].parent} has the name of a picture ({stem}); name them alike")
        count = sampling.number_of(samples, len(pictures))
        rows = np.arange(count) if ordered else sampling.shuffled(len(pictures))[:count]
    else:
        labels = _labels(place / LABELS, len(pictures))
        rows = sampling.subset(labels, samples, ordered=ordered)
    chosen = [pictures[row] for row in rows]
    inputs = _decoded(name, chosen)
    targets = (
        _masks(name, [by_stem.get(picture.stem) for picture in chosen], inputs)
        if masks
        else torch.from_numpy(labels[rows])
    )
    return Images(
        inputs, targets, name, number_of_classes(targets), square_side(inputs), IMAGENET_MEAN, IMAGENET_STD,
        counted=True, one_part=place == Path(name).expanduser(), available=len(pictures),
    )  # fmt: skip


def _parts(place: Path) -> tuple[list[Path], list[Path]] | None:
    """The pictures and the masks of a folder, None if it is of another form; labels.npy stands for no masks."""
    folders = {part: place / part for part in (*PICTURES, *MASKS) if (place / part).is_dir()}
    pictures = next((folders[part] for part in PICTURES if part in folders), None)
    masks = next((folders[part] for part in MASKS if part in folders), None)
    if pictures is None or (masks is None and not (place / LABELS).is_file()):
        return None
    return _sorted(pictures.iterdir()), _sorted(masks.iterdir()) if masks else []


def _sorted(files: Iterable[Path]) -> list[Path]:
    known = [file for file in files if is_picture(file.name)]
    return sorted(known, key=lambda file: [(int(n or 0), text) for n, text in re.findall(r"(\d+)|(\D+)", file.stem)])


def _labels(path: Path, count: int) -> np.ndarray:
    labels = mapped(path)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {labels.dtype} {labels.shape} for {count} pictures; expected class numbers ({count},)"
        )
    return np.asarray(labels, np.int64)


def _decoded(name: str, files: list[Path]) -> torch.Tensor:
    """Pictures of one size, (N, 3, H, W) uint8."""
    pictures = (decoding.Picture(i, str(file), str(file)) for i, file in enumerate(files))
    first, *others = decoding.sizes(pictures)
    for file, size in zip(files[1:], others, strict=True):
        if size != first:
            raise ValueError(
                f"{file} is {size[0]} x {size[1]}, {files[0].name} {first[0]} x {first[1]}; make all of one size"
            )
    memory.require(name, len(files), 3 * first[0] * first[1])
    inputs = np.empty((len(files), 3, first[1], first[0]), np.uint8)

    def decode(row: int) -> None:
        with decoding.naming(str(files[row])), decoding.opened(str(files[row]), str(files[row])) as picture:
            inputs[row] = np.asarray(rgb(picture)).transpose(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(len(files))))
    return torch.from_numpy(inputs)


def _masks(name: str, files: list[Path | None], inputs: torch.Tensor) -> torch.Tensor:
    """Class numbers of all pixels, (N, H, W): bytes, or integers for masks of 16 bits."""
    height, width = inputs.shape[2:]
    masks: list[np.ndarray] = []
    for file in files:
        if file is None:
            masks.append(np.full((height, width), NO_MASK, np.uint8))
            continue
        with decoding.naming(str(file)), decoding.opened(str(file), str(file)) as picture:
            if picture.mode not in ("1", "L", "P", "I", "I;16"):
                raise ValueError(
                    f"{file} is a picture of mode {picture.mode}, expected one class number per pixel (L or P)"
                )
            if picture.size != (width, height):
                raise ValueError(f"{file} is {picture.width} x {picture.height}, its picture {width} x {height}")
            found = np.asarray(picture)
        masks.append(found.astype(np.uint8 if found.dtype in (bool, np.uint8) else np.int64))
    wide = any(mask.dtype == np.int64 for mask in masks)
    memory.require(name, len(masks), (8 if wide else 1) * height * width)
    return torch.from_numpy(np.stack([mask.astype(np.int64) for mask in masks] if wide else masks))

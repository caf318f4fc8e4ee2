"""Sequences of slowly changing images: the files of CIFAR-10-P (Hendrycks & Dietterich 2019), or made from images.

Generated sequences have the steps of CIFAR-10-P; translations are in shares of the image, 1/32 per frame.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.data import cifar, file_contents
from landscape.data.numpy_files import mapped
from landscape.probe import derived_seed

FOLDERS = {"cifar10": "CIFAR-10-P", "cifar100": "CIFAR-100-P"}
FRAMES = {"translate": 16, "rotate": 31, "scale": 31, "brightness": 31, "gaussian_noise": 31}
NOISE = 0.02  # standard deviation in pixels of [0, 1]


def generated(images: Tensor, name: str, seed: int, *, first: int = 0) -> Tensor:
    """Sequences (N, frames, 3, H, W) of images (N, 3, H, W), both uint8; noise is drawn from (seed, row, frame).

    `first` is the row of the first image. What lies outside an image is black.
    """
    pixels, frames = images.float() / 255, []
    for t in range(FRAMES[name]):
        if name == "gaussian_noise":
            frame = pixels if t == 0 else pixels + NOISE * _noise(pixels, seed, first, t)
        else:
            frame = MADE[name](pixels, t)
        frames.append((255 * frame.clamp(0, 1)).round().to(torch.uint8))
    return torch.stack(frames, dim=1)


def _brightness(pixels: Tensor, t: int) -> Tensor:
    """The largest channel, the value of HSV, moved by (t - 15) x 0.015."""
    value = pixels.amax(dim=1, keepdim=True)
    moved = (value + 0.015 * (t - 15)).clamp(0, 1)
    return torch.where(value > 0, pixels * moved / value.clamp_min(1e-12), moved.expand_as(pixels))


def _affine(pixels: Tensor, *, degrees: float = 0.0, scale: float = 1.0, right: float = 0.0) -> Tensor:
    """Rotated about the centre, enlarged, and moved to the right by a share of the width; bilinear."""
    angle, height, width = math.radians(degrees), *pixels.shape[-2:]
    cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
    theta = torch.tensor([[cosine, sine * height / width, -2 * right], [-sine * width / height, cosine, 0.0]])
    grid = F.affine_grid(theta.expand(len(pixels), 2, 3).to(pixels), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _noise(pixels: Tensor, seed: int, first: int, t: int) -> Tensor:
    seeds = (derived_seed(seed, "gaussian_noise", first + row, t) for row in range(len(pixels)))
    drawn = [torch.randn(pixels.shape[1:], generator=torch.Generator().manual_seed(own)) for own in seeds]
    return torch.stack(drawn)


MADE: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "translate": lambda pixels, t: _affine(pixels, right=(t - 7) / 32),
    "rotate": lambda pixels, t: _affine(pixels, degrees=t - 15),
    "scale": lambda pixels, t: _affine(pixels, scale=0.7 + 0.02 * t),
    "brightness": _brightness,
}


def folder_of(clean: str, root: Path | None) -> Path | None:
    """The folder of the sequences of a data set's test images under a data root; None where there is none."""
    found = cifar.data_root(root) / FOLDERS[clean] if clean in FOLDERS else None
    return found if found is not None and any(found.glob("*.npy")) else None


def opened(folder: Path, name: str, images: int) -> Any:
    """The sequences of a file as an array (N, frames, H, W, 3) uint8 that is not in memory.

    Raises:
        FileNotFoundError: there is no such file; names those that are there.
        ValueError: it has another layout, one frame per sequence, or another number of sequences than `images`.
    """
    path = folder / f"{name}.npy"
    if not path.is_file():
        there = ", ".join(sorted(found.stem for found in folder.glob("*.npy"))) or "none"
        raise FileNotFoundError(f"there is no {path}; the folder has {there}")
    array = mapped(path)
    if array.dtype != np.uint8 or array.ndim != 5 or array.shape[-1] != 3:
        raise ValueError(f"{path} is {array.dtype} {array.shape}, expected uint8 (sequences, frames, H, W, 3)")
    if array.shape[1] < 2:
        raise ValueError(f"{path} has sequences of {array.shape[1]} frame; consistency needs at least 2 frames")
    if len(array) != images:
        raise ValueError(
            f"{path} has {len(array)} sequences and the test split {images} images; expected one sequence per image"
        )
    return array


def content(folder: Path, name: str, images: int, rows: np.ndarray) -> str:
    """Digest of the sequences of some images, the rows of a file.

    Raises:
        FileNotFoundError, ValueError: as `opened`.
    """
    opened(folder, name, images)
    return file_contents.rows_sha256(folder / f"{name}.npy", rows)

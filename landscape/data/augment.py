"""Augment whole batches of images as in training, from one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Generator, Tensor

from landscape.data.randaugment import STRONGEST, randaugment
from landscape.options import at_least, require


@dataclass(frozen=True)
class Augmentation:
    """Random crop, flip and RandAugment per image, then mixup or CutMix per batch and label smoothing.

    The fields are those of a recipe; the defaults change nothing. All random numbers come from a CPU generator, so that
    they are equal on any device.
    """

    crop: int = 0  # pixels of zero padding on each side before a crop of the original size
    flip: bool = False  # mirror left and right with probability 1/2
    randaugment: int = 0  # magnitude 0..10 of RandAugment (Cubuk et al. 2020, arXiv 1909.13719), 0 for none
    randaugment_layers: int = 2  # operations per image
    randaugment_std: float = 1.0  # standard deviation of the magnitude, drawn per image and operation
    mixup: float = 0.0  # alpha of Beta(alpha, alpha) (Zhang et al. 2018, arXiv 1710.09412), 0 for none
    cutmix: float = 0.0  # likewise for CutMix (Yun et al. 2019, arXiv 1905.04899)
    switch: float = 0.5  # probability of CutMix per batch, if both are enabled
    label_smoothing: float = 0.0  # s; a target becomes (1 - s) onehot + s / classes

    def __post_init__(self) -> None:
        for name in ("crop", "randaugment", "randaugment_std", "mixup", "cutmix"):
            at_least(name, getattr(self, name), 0)
        at_least("randaugment_layers", self.randaugment_layers, 1)
        require(self.randaugment <= STRONGEST, "randaugment", self.randaugment, f"0 to {STRONGEST}")
        require(0 <= self.switch <= 1, "switch", self.switch, "a probability, 0 to 1")
        require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "at least 0 and below 1")

    @classmethod
    def of_recipe(cls, recipe: Mapping[str, Any]) -> Augmentation:
        """The augmentation of a training recipe, whose other entries are ignored."""
        return cls(**{field.name: recipe[field.name] for field in fields(cls) if field.name in recipe})

    @property
    def soft(self) -> bool:
        """Whether targets become distributions over classes."""
        return self.mixup > 0 or self.cutmix > 0 or self.label_smoothing > 0

    def __call__(self, inputs: Tensor, targets: Tensor, *, classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """An augmented copy of a batch; the same seed draws the same augmentation.

        Inputs (N, C, H, W) are uint8, or floating point without RandAugment; they become floating point with mixup.
        Targets are (N,) int64 or distributions (N, classes); with mixup, CutMix or label smoothing they become
        distributions in float32.

        Raises:
            ValueError: the inputs are not images, or the targets not classes.
        """
        if inputs.ndim != 4 and (self.crop or self.flip or self.randaugment or self.cutmix):
            raise ValueError(
                f"augmentation needs images (N, C, H, W), got inputs of shape {tuple(inputs.shape)}; drop --augment"
            )
        generator = Generator().manual_seed(seed)
        if self.crop:
            inputs = cropped(inputs, self.crop, generator)
        if self.flip:
            inputs = flipped(inputs, generator)
        if self.randaugment:
            inputs = randaugment(
                inputs, generator, magnitude=self.randaugment, layers=self.randaugment_layers, std=self.randaugment_std
            )
        if not self.soft:
            return inputs, targets
        distributions = smoothed(targets, classes, self.label_smoothing)
        if self.mixup and not (self.cutmix and torch.rand((), generator=generator) < self.switch):
            share = beta(self.mixup, generator)
            blendable = inputs if inputs.is_floating_point() else inputs.to(torch.float32)
            return mixed(blendable, share), mixed(distributions, share)
        if self.cutmix:
            inputs, share = cutmixed(inputs, beta(self.cutmix, generator), generator)
            return inputs, mixed(distributions, share)
        return inputs, distributions


def cropped(inputs: Tensor, padding: int, generator: Generator) -> Tensor:
    """A random crop of each zero-padded image, at its original size."""
    n, _, height, width = inputs.shape
    offset = torch.randint(2 * padding + 1, (2, n), generator=generator).to(inputs.device, non_blocking=True)
    padded = F.pad(inputs, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (image, channel, y, x, height, width), a view
    return windows[torch.arange(n, device=inputs.device), :, offset[0], offset[1]]


def flipped(inputs: Tensor, generator: Generator) -> Tensor:
    """Each image mirrored left and right with probability 1/2."""
    mirror = torch.rand(len(inputs), generator=generator) < 0.5
    return torch.where(mirror.to(inputs.device, non_blocking=True)[:, None, None, None], inputs.flip(-1), inputs)


def smoothed(targets: Tensor, classes: int, smoothing: float) -> Tensor:
    """(1 - s) onehot + s / classes, float32 (N, classes); distributions are smoothed as they are."""
    if targets.is_floating_point() and targets.ndim == 2:
        sharp = targets.to(torch.float32)
    elif targets.ndim == 1 and not targets.is_floating_point():
        sharp = F.one_hot(targets, classes).to(torch.float32)
    else:
        raise ValueError(
            f"mixing and label smoothing need class numbers (N,) or distributions (N, classes), got targets "
            f"{tuple(targets.shape)} of {targets.dtype}; go without them"
        )
    return sharp * (1 - smoothing) + smoothing / classes if smoothing else sharp


def beta(alpha: float, generator: Generator) -> float:
    """A draw of Beta(alpha, alpha), by its inverse distribution function: torch's own takes no generator."""
    uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
    return float(betaincinv(alpha, alpha, uniform))


def mixed(values: Tensor, share: float) -> Tensor:
    """The sum share x + (1 - share) x', the partner x' of a row being its mirror image in the batch."""
    share = torch.tensor(share, dtype=torch.float32).item()  # so that both shares sum to one in float32
    return values * share + values.flip(0) * (1 - share)


def cutmixed(inputs: Tensor, share: float, generator: Generator) -> tuple[Tensor, float]:
    """Images with one rectangle of their partner's pixels, and the share of pixels they kept.

    The rectangle covers 1 - share of the area around a uniform centre; clipped at the border it is smaller,
    and the share that is returned counts the pixels.
    """
    height, width = inputs.shape[-2:]
    side = math.sqrt(1 - share)
    sides = (int(height * side), int(width * side))
    centres = [int(torch.randint(length, (), generator=generator)) for length in (height, width)]
    (top, bottom), (left, right) = (
        (max(0, centre - extent // 2), min(length, centre + extent // 2))
        for centre, extent, length in zip(centres, sides, (height, width), strict=True)
    )
    inputs = inputs.clone()
    inputs[..., top:bottom, left:right] = inputs.flip(0)[..., top:bottom, left:right]
    return inputs, 1 - (bottom - top) * (right - left) / (height * width)

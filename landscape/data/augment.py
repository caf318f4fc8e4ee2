"""Augment whole batches of images as in training, from one seed; RandAugment (Cubuk et al. 2020, arXiv 1909.13719).

The fifteen operations of RandAugment, their strengths and the probability of 1/2 are those of `rand-m9-n2-mstd1.0` in
timm, including its oddities: at full magnitude `posterize` and the enhancements are at their mild or bright end. Each
image draws its own operations, strengths and signs; the loop is over operations, with the images of each gathered.
Differences: one colour (mid-grey) fills empty areas, and geometry is always bilinear.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Generator, Tensor

from landscape.options import at_least, require

STRONGEST = 10  # magnitudes count from 0 to this
PROBABILITY = 0.5
FILL = 128.0
Row = tuple[float, float, float]  # of the matrix of an affine map


def randaugment(inputs: Tensor, generator: Generator, *, magnitude: float, layers: int, std: float) -> Tensor:
    """Images (N, C, H, W) after `layers` random operations each, of strength magnitude + std N(0, 1), cut to 0..10.

    The generator is on the CPU.

    Raises:
        ValueError: the inputs are not uint8 images of one or three channels.
    """
    if inputs.dtype != torch.uint8 or inputs.shape[1] not in (1, 3):
        raise ValueError(
            f"RandAugment needs uint8 images of 1 or 3 channels, got {inputs.dtype} {tuple(inputs.shape)}; "
            "set randaugment to 0"
        )
    n = len(inputs)
    inputs = inputs.clone()
    for _ in range(layers):
        operation = torch.randint(len(OPERATIONS), (n,), generator=generator)
        applied = torch.rand(n, generator=generator) < PROBABILITY
        strength = magnitude + std * torch.randn(n, generator=generator)
        sign = torch.randint(2, (n,), generator=generator) * 2 - 1
        level = strength.clamp(0, STRONGEST) / STRONGEST * sign
        for k, operate in enumerate(OPERATIONS):
            selected = torch.nonzero(applied & (operation == k)).flatten()  # on the CPU, without waiting for a device
            if len(selected):
                rows = selected.to(inputs.device, non_blocking=True)
                inputs[rows] = operate(inputs[rows], level[selected].to(inputs.device, non_blocking=True))
    return inputs


# Each operation maps images (n, C, H, W) uint8 and levels (n,) in [-1, 1] to images. Geometry takes the sign
# of a level, the others its absolute value.


def autocontrast(x: Tensor, _level: Tensor) -> Tensor:
    """Each channel stretched to 0..255."""
    flat = x.flatten(2).int()
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    grey = torch.arange(256, device=x.device)
    return _looked_up(x, torch.where(high > low, (grey - low) * 255 // (high - low).clamp(min=1), grey))


def equalize(x: Tensor, _level: Tensor) -> Tensor:
    """Each channel with a flat histogram, by the integer rule of Pillow."""
    flat = x.flatten(2).long()
    count = torch.zeros(*x.shape[:2], 256, dtype=torch.long, device=x.device)
    count.scatter_add_(2, flat, torch.ones_like(flat))
    last = count.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    table = (count.cumsum(2) - count + step // 2) // step.clamp(min=1)
    return _looked_up(x, torch.where(step > 0, table, torch.arange(256, device=x.device)))


def invert(x: Tensor, _level: Tensor) -> Tensor:
    """The negative."""
    return 255 - x


def rotate(x: Tensor, level: Tensor) -> Tensor:
    """By up to 30 degrees about the centre."""
    height, width = x.shape[-2:]
    angle = torch.deg2rad(-30 * level)
    cosine, sine = angle.cos(), angle.sin()
    across = torch.stack((cosine, sine, width / 2 - cosine * width / 2 - sine * height / 2), 1)
    down = torch.stack((-sine, cosine, height / 2 + sine * width / 2 - cosine * height / 2), 1)
    return _moved(x, torch.stack((across, down), 1))


def posterize(x: Tensor, level: Tensor) -> Tensor:
    """The highest 0 to 4 bits of each value."""
    dropped = 8 - (4 * level.abs()).int()
    return (x.int() >> _each(dropped) << _each(dropped)).to(torch.uint8)


def solarize(x: Tensor, level: Tensor) -> Tensor:
    """Values from a threshold upward inverted; the threshold rises with the level."""
    return torch.where(x < _each((256 * level.abs()).int()), x, 255 - x)


def solarize_add(x: Tensor, level: Tensor) -> Tensor:
    """The dark half brightened by up to 110."""
    return torch.where(x < 128, x + _each((110 * level.abs()).int()), x).clamp(max=255).to(torch.uint8)


def color(x: Tensor, level: Tensor) -> Tensor:
    """Blend of the grey image and the image; nothing for one channel."""
    return _blended(_grey(x), x, level)


def contrast(x: Tensor, level: Tensor) -> Tensor:
    """Blend of the mean grey and the image."""
    mean = (_grey(x).float().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _blended(mean, x, level)


def brightness(x: Tensor, level: Tensor) -> Tensor:
    """Blend of black and the image."""
    return _blended(torch.zeros_like(x), x, level)


def sharpness(x: Tensor, level: Tensor) -> Tensor:
    """Blend of the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13, but for its border, and the image."""
    if min(x.shape[-2:]) < 3:
        return x
    kernel = torch.ones(3, 3, device=x.device)
    kernel[1, 1] = 5
    channels = x.shape[1]
    smooth = x.float()
    inner = F.conv2d(smooth, (kernel / 13).expand(channels, 1, 3, 3), groups=channels)
    smooth[..., 1:-1, 1:-1] = (inner + 0.5).floor()
    return _blended(smooth, x, level)


def _displaced(x: Tensor, level: Tensor, *, across: Row = (0, 0, 0), down: Row = (0, 0, 0)) -> Tensor:
    identity = torch.eye(2, 3, device=x.device)
    change = torch.tensor((across, down)).to(x.device, non_blocking=True)
    return _moved(x, identity + level.view(-1, 1, 1) * change)


shear_x = partial(_displaced, across=(0, 0.3, 0))  # rows shifted by up to 0.3 pixels per row
shear_y = partial(_displaced, down=(0.3, 0, 0))  # columns shifted by up to 0.3 pixels per column


def translate_x(x: Tensor, level: Tensor) -> Tensor:
    """By up to 0.45 of the width."""
    return _displaced(x, level, across=(0, 0, 0.45 * x.shape[-1]))


def translate_y(x: Tensor, level: Tensor) -> Tensor:
    """By up to 0.45 of the height."""
    return _displaced(x, level, down=(0, 0, 0.45 * x.shape[-2]))


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    autocontrast, equalize, invert, rotate, posterize, solarize, solarize_add, color, contrast, brightness, sharpness,
    shear_x, shear_y, translate_x, translate_y,
)  # fmt: skip


def _each(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _grey(x: Tensor) -> Tensor:
    """Luma of ITU-R 601 in Pillow's fixed-point arithmetic, (n, 1, H, W)."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.int().unbind(1)
    luma = 19595 * red + 38470 * green + 7471 * blue + 0x8000 >> 16
    return luma.unsqueeze(1).to(torch.uint8)


def _blended(start: Tensor, x: Tensor, level: Tensor) -> Tensor:
    """From start towards x by 0.1 to 1.9 of the way: below 1 an interpolation, above an exaggeration."""
    factor = _each(0.1 + 1.8 * level.abs())
    return (start + factor * (x.float() - start)).clamp(0, 255).to(torch.uint8)


def _looked_up(x: Tensor, table: Tensor) -> Tensor:
    """Every value replaced by its entry in the table (n, C, 256) of its image and channel."""
    return table.clamp(0, 255).gather(2, x.flatten(2).long()).to(torch.uint8).view_as(x)


def _moved(x: Tensor, matrix: Tensor) -> Tensor:
    """Images under affine maps, matrix (n, 2, 3): from an output's (x, y, 1) to where its value is read.

    Coordinates are pixels with the origin in the top-left corner, pixel centres at halves.
    """
    height, width = x.shape[-2:]
    down, across = torch.meshgrid(
        torch.arange(height, device=x.device) + 0.5, torch.arange(width, device=x.device) + 0.5, indexing="ij"
    )
    points = torch.stack((across, down, torch.ones_like(across)), -1)  # (H, W, 3)
    read = torch.einsum("nij,hwj->nhwi", matrix, points)
    extent = torch.tensor((width, height)).to(x.device, non_blocking=True)
    grid = 2 * read / extent - 1
    sampled = F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False)
    inside = ((read >= 0) & (read < extent)).all(-1).unsqueeze(1)
    return torch.where(inside, sampled.round(), FILL).to(torch.uint8)


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
    def of_recipe(cls, recipe: Mapping[str, Any]) -> "Augmentation":
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

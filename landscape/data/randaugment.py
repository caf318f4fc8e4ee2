"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) on whole batches, without a loop over images.

The fifteen operations, their strengths and the probability of 1/2 are those of `rand-m9-n2-mstd1.0` in timm, including
its oddities: at full magnitude `posterize` and the enhancements are at their mild or bright end. Each image draws its
own operations, strengths and signs; the loop is over operations, with the images of each gathered. Differences: one
colour (mid-grey) fills empty areas, and geometry is always bilinear.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

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

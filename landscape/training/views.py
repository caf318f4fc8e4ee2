"""Random views of images for contrastive learning: SimCLR's augmentation (Chen et al. 2020, arXiv 2002.05709)."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

LEAST_AREA = 0.2  # of the crop, relative to the image
LONGEST = 4 / 3  # side ratio of the crop
JITTER, GREY = 0.8, 0.2  # probabilities of colour jitter and of a grey image
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.4, 0.4, 0.4, 0.1  # strengths of the jitter
LUMA = (0.299, 0.587, 0.114)
# RGB to luma and two colour differences (YIQ): a rotation of the last two is a change of hue.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def view(images: Tensor, seed: int) -> Tensor:
    """A random view of each image (N, C, H, W) uint8, of the same size and type; the same seed draws the same view.

    Crop of 20 to 100 % of the area (bilinear), mirror image with probability 1/2, and of colour images jitter of
    brightness, contrast, saturation and hue with probability 0.8, then grey with probability 0.2. Without blur, as
    SimCLR does for images of 32 pixels. All random numbers come from a CPU generator.
    """
    generator = Generator().manual_seed(seed)
    x = cropped(images.to(torch.float32) / 255, generator)
    if images.shape[1] == 3:
        x = jittered(x, generator)
    return (255 * x).round_().clamp_(0, 255).to(torch.uint8)


def cropped(x: Tensor, generator: Generator) -> Tensor:
    """A random part of each image, resized to the whole and perhaps mirrored, in one bilinear resampling."""
    n = len(x)
    uniform = torch.rand(5, n, generator=generator)
    area = LEAST_AREA + (1 - LEAST_AREA) * uniform[0]
    ratio = torch.exp((2 * uniform[1] - 1) * math.log(LONGEST))
    width, height = ((area * r).sqrt().clamp(max=1.0) for r in (ratio, 1 / ratio))
    centre_x, centre_y = ((2 * u - 1) * (1 - side) for u, side in ((uniform[2], width), (uniform[3], height)))
    mirror = torch.where(uniform[4] < 0.5, -1.0, 1.0)
    affine = torch.zeros(n, 2, 3)
    affine[:, 0, 0], affine[:, 0, 2], affine[:, 1, 1], affine[:, 1, 2] = width * mirror, centre_x, height, centre_y
    grid = F.affine_grid(affine.to(x.device, non_blocking=True), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def jittered(x: Tensor, generator: Generator) -> Tensor:
    """Colour jitter of some images (N, 3, H, W) in [0, 1], then grey for some; in this order, unlike torchvision."""
    n = len(x)
    uniform = torch.rand(6, n, generator=generator).to(x.device, non_blocking=True)[..., None, None, None]
    brightness, contrast, saturation = (
        1 + s * (2 * u - 1) for s, u in zip((BRIGHTNESS, CONTRAST, SATURATION), uniform, strict=False)
    )
    changed = (x * brightness).clamp(0, 1)
    level = grey(changed).mean(dim=(2, 3), keepdim=True)
    changed = (level + contrast * (changed - level)).clamp(0, 1)
    luma = grey(changed)
    changed = turned((luma + saturation * (changed - luma)).clamp(0, 1), HUE * (2 * uniform[3] - 1)).clamp(0, 1)
    x = torch.where(uniform[4] < JITTER, changed, x)
    return torch.where(uniform[5] < GREY, grey(x).expand_as(x), x)


def grey(x: Tensor) -> Tensor:
    """Luma of RGB images (N, 3, H, W), (N, 1, H, W)."""
    weights = torch.tensor(LUMA, device=x.device, dtype=x.dtype).view(1, 3, 1, 1)
    return (x * weights).sum(dim=1, keepdim=True)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """RGB images with their hue turned by so many full turns (N, 1, 1, 1), at constant luma."""
    matrix = torch.tensor(YIQ, device=x.device, dtype=torch.float64)
    angle = 2 * math.pi * turns.flatten().double()
    rotation = torch.zeros(len(x), 3, 3, device=x.device, dtype=torch.float64)
    rotation[:, 0, 0] = 1
    rotation[:, 1, 1], rotation[:, 2, 2] = angle.cos(), angle.cos()
    rotation[:, 1, 2], rotation[:, 2, 1] = -angle.sin(), angle.sin()
    change = torch.linalg.inv(matrix) @ rotation @ matrix
    return torch.einsum("nij,njhw->nihw", change.to(x.dtype), x)

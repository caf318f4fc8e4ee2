"""Load the two splits of a training run, and draw SimCLR's random views of images (arXiv 2002.05709)."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from landscape import data as datasets
from landscape.data.dataset import Images
from landscape.data.numpy_files import is_tokens

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


log = logging.getLogger(__name__)


def splits(
    data: str, *, root: Path | None, image_size: int | None = None, fraction: float = 1.0
) -> tuple[Images, Images]:
    """The train split, reduced to a fraction of every class, and the whole test split, images of one size.

    Raises:
        FileNotFoundError: the data do not exist.
        ValueError: they are not square images with classes, or their splits do not fit together.
    """
    needs = "training needs square images (N, C, H, H) and int64 classes (N,) from 0 upward"
    if is_tokens(data):
        raise ValueError(f"{data} holds tokens; {needs}")
    training = datasets.load(data, root=root, split="train", image_size=image_size)
    inputs, targets = training.inputs, training.targets
    classes = targets.ndim == 1 and targets.dtype == torch.int64 and targets.min() >= 0
    if inputs.ndim != 4 or inputs.shape[2] != inputs.shape[3] or not classes:
        raise ValueError(
            f"{data} gives inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}; {needs}"
        )
    size = inputs.shape[-1]
    if image_size not in (None, size):
        raise ValueError(f"--model-arg image_size={image_size}: the images of {data} have {size} pixels; leave it out")
    testing = datasets.load(data, root=root, split="test", image_size=size)
    if training.one_part:
        log.warning("note: %s has one part: accuracy is that of the samples that are trained on", data)
    if testing.classes != training.classes:
        raise ValueError(
            f"{data} has {training.classes} classes to train on and {testing.classes} to test on; "
            "give both parts the same classes"
        )
    kept = balanced_rows(targets, round(fraction * len(targets)))
    if len(kept) < 2:
        raise ValueError(f"{data} leaves {len(kept)} samples to train on, expected at least 2; raise --fraction")
    return _ready(replace(training, inputs=inputs[kept], targets=targets[kept])), _ready(testing)


def balanced_rows(targets: Tensor, count: int) -> Tensor:
    """`count` rows of `targets` (N,) in their order, with the same share of every class, give or take one."""
    by_class = targets.argsort(stable=True)
    sizes = targets.bincount()
    place = torch.empty_like(targets)  # of a row among those of its class: 0 .. size - 1
    place[by_class] = torch.arange(len(targets)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    share = (place + 0.5) / sizes[targets]
    return share.argsort(stable=True)[:count].sort().values


def requested_size(model_args: Mapping[str, Any]) -> int | None:
    """The image size among a model's arguments, None if there is none.

    Raises:
        ValueError: it is not a size, or an argument is given that the data decide.
    """
    for name in ("classes", "channels"):
        if name in model_args:
            raise ValueError(f"--model-arg {name}={model_args[name]}: the data decide that; leave it out")
    if "image_size" not in model_args:
        return None
    size = str(model_args["image_size"])
    if not size.isdigit() or int(size) < 1:
        raise ValueError(f"--model-arg image_size must be a number of pixels such as 224, got {size}")
    return int(size)


def _ready(images: Images) -> Images:
    """Keep pixels as bytes, normalised batch by batch; convert a callable's numbers to the weights' float32."""
    return images if images.mean else replace(images, inputs=images.inputs.float())

"""Image preprocessing of a pretrained network: size, crop, interpolation, mean and std."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from landscape.data.dataset import Images
from landscape.options import invalid, one_of, require

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")

Crop: TypeAlias = float | Literal["squash"]


@dataclass(frozen=True)
class Resize:
    """How a picture is resized and cropped; equal to the transforms of timm, torchvision and transformers.

    The shorter side becomes size / crop, rounded down, and the centre is cropped; "squash" scales both sides to the
    size without cropping.
    """

    interpolation: str = "bilinear"  # name of Pillow's filter, which antialiases when it shrinks
    crop: Crop = 1.0
    # sizes (width, height) of the pictures that were resized with it so far
    seen: set[tuple[int, int]] = field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        valid = self.crop == "squash" or 0 < self.crop <= 1
        require(valid, "crop", self.crop, "a share above 0 and at most 1, or squash")

    def pixels(self, image: Image.Image, size: int) -> np.ndarray:
        self.seen.add(image.size)
        image = rgb(image)
        resample = Image.Resampling[self.interpolation.upper()]
        if self.crop == "squash":
            image = image.resize((size, size), resample)
        else:
            short = math.floor(size / self.crop + 1e-6)  # of 224 / (224 / 232), say
            width, height = (
                short if side == min(image.size) else int(short * side / min(image.size)) for side in image.size
            )
            left, top = round((width - size) / 2), round((height - size) / 2)
            image = image.resize((width, height), resample).crop((left, top, left + size, top + size))
        return np.asarray(image).transpose(2, 0, 1)


@dataclass(frozen=True)
class Preprocessing:
    """What a network expects of its images."""

    size: int  # side of the images
    resize: Resize = Resize()  # how they are brought to it
    mean: tuple[float, ...] = IMAGENET_MEAN  # per channel, of pixels in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD  # likewise

    def __str__(self) -> str:
        crop = self.resize.crop if self.resize.crop == "squash" else f"crop {self.resize.crop:.4g}"
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"{self.size} px, {crop}, {self.resize.interpolation}, mean {mean}, std {std}"


def rgb(image: Image.Image) -> Image.Image:
    """A picture in 8 bits per channel: of 16 bits the upper ones, as Pillow takes them of colours.

    Pillow itself cuts whatever exceeds 255. Transparency is dropped.

    Raises:
        ValueError: its mode has no known range.
    """
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode[0] in "IF" and not sixteen:
        raise ValueError(
            f"its mode is {image.mode}, numbers without a known range; expected 8 or 16 bits per channel, or a tensor"
        )
    if sixteen:
        image = Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns of the direct way
    return image.convert("RGB")


def parse_crop(text: str) -> Crop:
    """Parse a share such as `0.875`, or `squash`. Raises OptionError: it is neither."""
    if text == "squash":
        return "squash"
    try:
        return float(text)
    except ValueError:
        raise invalid("crop", text, "a share such as 0.875, or squash") from None


def resize_images(images: Images, size: int, resize: Resize) -> Images:
    """Resize uint8 images (N, 3, H, W) with Pillow, as pictures are; unchanged if they have the size already."""
    if images.inputs.shape[-2:] == (size, size) and resize.crop in (1.0, "squash"):
        return images
    pictures = images.inputs.permute(0, 2, 3, 1).numpy()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda picture: resize.pixels(Image.fromarray(picture), size), pictures))
    return replace(images, inputs=torch.from_numpy(np.stack(found)), size=size)


def default_normalisation(inputs: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of uint8 images without any of their own: ImageNet's for three channels; empty for other inputs."""
    if inputs.dtype != torch.uint8 or inputs.ndim != 4:
        return (), ()
    grey = (0.5,) * inputs.shape[1]
    return (IMAGENET_MEAN, IMAGENET_STD) if len(grey) == 3 else (grey, grey)


def resized(images: Images, size: int | None, *, block: int = 1024) -> Images:
    """Square uint8 images of this size: shorter side to it (bilinear, antialiased, rounded), then centre crop.

    Unchanged for None, or if they have that size already; `block` images at a time bound the floating-point copy.
    """
    height, width = images.inputs.shape[2:]
    if size is None or height == width == size:
        return images
    scale = size / min(height, width)
    larger = (max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = ((side - size) // 2 for side in larger)
    parts = [
        F.interpolate(part.float(), size=larger, mode="bilinear", antialias=True).round().to(torch.uint8)
        for part in torch.split(images.inputs, block)
    ]
    cropped = [part[..., top : top + size, left : left + size] for part in parts]
    return replace(images, inputs=torch.cat(cropped), size=size)

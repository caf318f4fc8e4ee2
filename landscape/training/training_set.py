"""Load the two splits of a training run: one to train on, one to evaluate on."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landscape import data as datasets
from landscape.data.dataset import Images

log = logging.getLogger(__name__)


def splits(
    data: str, *, root: Path | None, image_size: int | None = None, fraction: float = 1.0
) -> tuple[Images, Images]:
    """The train split, reduced to a fraction of every class, and the whole test split, images of one size.

    Raises:
        FileNotFoundError: the data do not exist.
        ValueError: they are not square images with classes, or their splits do not fit together.
    """
    training = datasets.load(data, root=root, split="train", image_size=image_size)
    inputs, targets = training.inputs, training.targets
    if inputs.ndim != 4 or inputs.shape[2] != inputs.shape[3] or targets.ndim != 1 or targets.dtype != torch.int64:
        raise ValueError(
            f"{data} gives inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}; "
            "training needs square images (N, C, H, H) and int64 classes (N,)"
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

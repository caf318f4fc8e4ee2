"""Images of a subject's data as colours for figures."""

import numpy as np
import torch
from torch import Tensor

from landscape.subject.subject import Subject


def first_inputs(subject: Subject, count: int) -> Tensor:
    """The first inputs of the data as the model sees them, (count, C, H, W).

    Raises:
        ValueError: the inputs are not images, or there are fewer.
    """
    found: list[Tensor] = []
    for i in range(len(subject.batches)):
        inputs = subject.batch(i)[0]
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            raise ValueError("pictures need images (N, C, H, W) as inputs; measure this on image data")
        found.append(inputs)
        if sum(map(len, found)) >= count:
            return torch.cat(found)[:count]
    raise ValueError(f"{count} pictures were asked for, the data have {sum(map(len, found))} samples; ask for fewer")


def colours(subject: Subject, inputs: Tensor, *, like: Tensor | None = None) -> np.ndarray:
    """Inputs (N, C, H, W) of the model as colours in [0, 1], (N, 3, H, W) float32.

    Normalisation is undone where the data know it; else each picture is stretched from its least to its largest value,
    or from those of the pictures `like` it. Other numbers of channels than three become grey.
    """
    x = inputs.detach().cpu().double()
    images = subject.images
    if images is not None and images.mean:
        mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (images.mean, images.std))
        x = x * std + mean
    else:
        of = (x if like is None else like.detach().cpu().double()).flatten(1)
        low, high = (values.view(-1, 1, 1, 1) for values in (of.amin(dim=1), of.amax(dim=1)))
        x = (x - low) / (high - low).clamp_min(1e-12)
    if x.shape[1] != 3:
        x = x.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    return x.clamp(0, 1).float().numpy()

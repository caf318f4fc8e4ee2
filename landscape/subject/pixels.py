"""Pixels in [0, 1] of a subject's images: their gradients, adversarial changes of them, and the inputs they make."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from landscape.data import structure
from landscape.data.dataset import in_unit_range
from landscape.options import OptionError, require
from landscape.subject import members, sample_statistics
from landscape.subject.losses import loss_gradients
from landscape.subject.subject import Subject

Losses = Callable[[Tensor], Tensor]  # pixels in [0, 1] -> a loss per sample


def fgsm(losses: Losses, pixels: Tensor, eps: float) -> Tensor:
    """One step of eps along the sign of the gradient of the loss, clamped to [0, 1]."""
    return (pixels + eps * gradient(losses, pixels).sign()).clamp(0, 1)


def pgd(losses: Losses, pixels: Tensor, eps: float, *, step: float, steps: int, start: Tensor) -> Tensor:
    """Steps along the sign of the gradient, each projected onto the ball of eps around the pixels and onto [0, 1]."""
    changed = start
    for _ in range(steps):
        changed = changed + step * gradient(losses, changed).sign()
        changed = (pixels + (changed - pixels).clamp(-eps, eps)).clamp(0, 1)
    return changed


def gradient(losses: Losses, pixels: Tensor) -> Tensor:
    """Gradient of the sum of the losses by the pixels; that of each sample, as the losses are independent."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = pixels.detach().clone().requires_grad_()
        (found,) = loss_gradients(losses(leaf).sum(), [leaf])
    return found.detach()


def losses_of(subject: Subject, batch: int) -> Losses:
    """The losses of a mini-batch as a function of its pixels, (n, C, H, W) -> (n,), through the normalisation."""
    whole, targets = subject.batch(batch)

    def losses(pixels: Tensor) -> Tensor:
        inputs = members.with_inputs(whole, as_inputs(subject, pixels, members.unpositioned(whole)))
        return subject.losses(subject.outputs(inputs), targets)

    return losses


def loss_and_correctness_at(subject: Subject, batch: int, pixels: Tensor) -> Tensor:
    """Loss and correctness of a mini-batch with other pixels, (2, n) float64, on the device; inside `evaluating`."""
    whole, targets = subject.batch(batch)
    inputs = members.with_inputs(whole, as_inputs(subject, pixels, members.unpositioned(whole)))
    return sample_statistics.loss_and_correctness(subject, inputs, targets)


def pixels_of(subject: Subject, batch: int) -> Tensor:
    """Pixels of a mini-batch in [0, 1], in the precision of the model."""
    images = subject.images
    if images is None or not images.mean:
        inputs: Any = members.unpositioned(subject.batch(batch)[0])
        return cast(Tensor, inputs)
    rows = slice(batch * subject.batch_size, (batch + 1) * subject.batch_size)
    return in_unit_range(images.inputs[rows].to(subject.device), subject.dtype)


def as_inputs(subject: Subject, pixels: Tensor, like: Any) -> Tensor:
    """What the model takes for pixels in [0, 1]: normalised as the data are."""
    images = subject.images
    if images is None or not images.mean:
        return pixels
    mean, std = (torch.tensor(values, dtype=pixels.dtype).view(-1, 1, 1) for values in (images.mean, images.std))
    return ((pixels - mean.to(pixels.device)) / std.to(pixels.device)).to(like.dtype)


def refuse_other_than_pixels(subject: Subject, probe: str) -> None:
    """Reject inputs that are no pixels in [0, 1], whose changes would have no size, and losses of whole batches.

    Raises:
        ValueError: the inputs are something else; says what.
    """
    if subject.traits.whole == "both" or subject.traits.mean_only:
        raise ValueError(
            f"{probe} needs a loss per sample of (outputs, targets), got one that calls the model or gives a mean; "
            "give --loss cross-entropy"
        )
    inputs = members.unpositioned(subject.batch(0)[0])
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim != 4:
        got = f"{tuple(inputs.shape)} {inputs.dtype}" if isinstance(inputs, Tensor) else structure.kind_of(inputs)
        raise ValueError(f"{probe} needs images (N, C, H, W), got {got}; measure it on image data")
    if getattr(subject.batches, "augmentation", None) is not None:
        raise OptionError(f"--augment changes the pixels; drop it: {probe} measures clean images")
    if subject.images is not None and subject.images.mean:
        return
    low, high = extremes(subject)
    if low < 0 or high > 1:
        raise ValueError(
            f"{probe} needs pixels in [0, 1], got inputs from {low:.3g} to {high:.3g} that are "
            "used as they are; return uint8 pictures, and give --mean and --std"
        )


def extremes(subject: Subject) -> tuple[float, float]:
    """The smallest and the largest value of all inputs, which are tensors."""
    batches: list[Any] = [members.unpositioned(inputs) for inputs, _ in subject.each_batch()]
    found = torch.stack([torch.stack(torch.aminmax(inputs)) for inputs in batches])
    return found[:, 0].min().item(), found[:, 1].max().item()


def parse_pixels(name: str, text: str) -> tuple[float, ...]:
    """Parse `0.007,2/255`. Raises OptionError: a part is not a number or a fraction."""
    found = []
    for part in text.split(","):
        try:
            above, slash, below = part.partition("/")
            found.append(float(above) / (float(below) if slash else 1.0))
        except (ValueError, ZeroDivisionError):
            require(False, name, text or "nothing", "numbers or fractions such as 8/255, separated by commas")
    return tuple(found)


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

"""Networks and synthetic data of the stages, made from a seed on any machine: nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape import models
from landscape.subject.batchnorm import refresh
from landscape.subject.subject import Subject

CLASSES = 10
KEPT = "gpu-kept"  # folder of weights and snapshots that a later call uses again
NOISE = 2.0  # standard deviation of the images around their class's pattern
# Tiny versions of the demo networks, by name and size of their images.
TINY: dict[str, dict[str, Any]] = {
    "resnet_demo": {"blocks": (1, 1), "width": 4},
    "vit_demo": {"depth": 1, "dim": 12},
    "alternet_demo": {"blocks": (1, 2), "msa": (0, 1), "heads": (1, 1), "head_dim": 4, "width": 4},
}


def build(name: str, size: int, *, small: bool = False) -> nn.Module:
    """A network of the package with ten classes, at the weights of seed 0."""
    torch.manual_seed(0)
    return models.build(name, classes=CLASSES, image_size=size, **(TINY[name] if small else {})).eval()


def images(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of ten coarse patterns with noise, (count, 3, size, size), and their classes: learnable."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(1234))
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")
    noise = torch.randn(count, 3, size, size, generator=generator)
    return patterns[targets] + NOISE * noise, targets


def subject(model: nn.Module, data: tuple[Tensor, Tensor], batch_size: int, label: str = "model") -> Subject:
    """A network with samples, which loading moves to its device."""
    return landscape.load(model, data=data, batch_size=batch_size, classes=CLASSES, label=label)


def train(model: nn.Module, size: int, *, updates: int, batch_size: int) -> None:
    """A short training on the model's device with AdamW, warmed up; leaves the model in eval mode."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    inputs, targets = (tensor.to(device) for tensor in images(4 * batch_size, size, seed=1))
    model.train()
    for i in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (i + 1) / 20)
        rows = torch.arange(batch_size, device=device) + batch_size * (i % 4)
        loss = F.cross_entropy(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    model.eval()


def prepared(
    name: str, size: int, state: str, device: torch.device, *, folder: Path, small: bool, batch_size: int, batches: int
) -> Subject:
    """A network on the device, briefly trained or not, with mini-batches of its task.

    Trained weights are kept in the folder, so that a later call measures the same network. Untrained networks have
    batch-norm statistics of the mini-batches, for zeros and ones make their outputs explode.
    """
    model = build(name, size, small=small).to(device)
    file = folder / KEPT / f"{name}-{size}{'-tiny' if small else ''}.pt"
    if state == "trained" and file.exists():
        model.load_state_dict(torch.load(file, map_location=device, weights_only=True))
    elif state == "trained":
        train(model, size, updates=3 if small else 150, batch_size=8 if small else 64)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")  # a kill leaves no half-written weights to a later call
        torch.save(model.state_dict(), unfinished)
        unfinished.replace(file)
    made = subject(model, images(batch_size * batches, size), batch_size, label=f"{name} {size} px, {state}")
    if state != "trained":
        refresh(made, batches)
    return made

"""Cost of a training step: a plain loop with per-image transforms, the bare step on data in memory, and the trainer.

    python benchmarks/train.py [--data-root DIR] [--rounds 9] [--steps 4] [--threads 1] [--batch-size 96] [--wall]
        [--device cuda]

Demo networks on CIFAR-10. `per image` is the usual loop: a data set of decoded images that crops, mirrors, converts
and normalises one image at a time with Pillow, torch's `DataLoader` in the same process, default layout and
optimiser. `bare` does forward, backward, clipping and the fused optimiser on one prepared mini-batch in the memory
format that the trainer chooses. `trainer` is what `landscape train` runs, by its recipe: shuffled, augmented, mixed.
Every round runs each column once, so that other load affects all of them; ratios are medians over rounds, in process
time (or `--wall`, and on a GPU always).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from measuring import Work, clock_of, header, in_turns, on_device, parser, row
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from landscape import models
from landscape.data.dataset import Images
from landscape.data.recipes import recipe
from landscape.training.training_set import splits
from landscape.training.updates import Trainer, epoch_updates, with_memory_format

CASES = (("resnet_demo", "demo"), ("vit_demo", "demo"), ("resnet_demo", "cifar-cnn"), ("vit_demo", "cifar-vit"))
PADDING = 4


class PerImage(Dataset[tuple[Tensor, int]]):
    """Random crop, mirror, to tensor, normalise: what torchvision's transforms do, without their overhead."""

    def __init__(self, images: Images) -> None:
        self.pictures = [Image.fromarray(image) for image in images.inputs.permute(0, 2, 3, 1).numpy()]
        self.targets = images.targets.tolist()
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (images.mean, images.std))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        size = self.pictures[i].width
        left, top = torch.randint(2 * PADDING + 1, (2,)).tolist()
        image = ImageOps.expand(self.pictures[i], PADDING).crop((left, top, left + size, top + size))
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return tensor.sub_(self.mean).div_(self.std), self.targets[i]


def per_image(network: nn.Module, images: Images, batch_size: int, device: str) -> Iterator[None]:
    loader = DataLoader(PerImage(images), batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    while True:
        for inputs, targets in loader:
            step(network, optimizer, inputs.to(device), targets.to(device))
            yield


def step(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
    loss = F.cross_entropy(network(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def bare(trainer: Trainer, batch_size: int) -> Iterator[None]:
    layout = torch.channels_last if trainer.recipe.memory_format == "channels_last" else torch.contiguous_format
    inputs = trainer.images.normalised(trainer.images.inputs[:batch_size]).contiguous(memory_format=layout)
    targets = trainer.images.targets[:batch_size]
    trainer.network.train()
    while True:
        step(trainer.network, trainer.optimizer, inputs, targets)
        yield


def full(trainer: Trainer) -> Iterator[None]:
    for epoch in count(1):
        for _ in epoch_updates(trainer, epoch):
            yield


def measure(model: str, name: str, images: Images, arguments: argparse.Namespace) -> dict[str, list[float]]:
    sizes = {"classes": images.classes, "image_size": images.size}
    resolved = with_memory_format(recipe(name, batch_size=arguments.batch_size, epochs=1000), model, sizes)
    made = [models.build(model, **sizes) for _ in range(3)]
    columns = {
        "per image": per_image(made[0].to(arguments.device).train(), images, arguments.batch_size, arguments.device),
        "bare": bare(Trainer.of(made[1], images.to(arguments.device), resolved, seed=0), arguments.batch_size),
        "trainer": full(Trainer.of(made[2], images.to(arguments.device), resolved, seed=0)),
    }
    clock = time.perf_counter if arguments.wall and arguments.device == "cpu" else clock_of(arguments.device)

    def ways(number: int) -> dict[str, Work]:
        return {name: lambda steps=steps: list(islice(steps, number)) for name, steps in columns.items()}

    in_turns(ways(2), 1)
    found = in_turns(ways(arguments.steps), arguments.rounds, clock)
    return {name: [spent / arguments.steps for spent in times] for name, times in found.items()}


def main() -> None:
    options = on_device(parser(__doc__, rounds=9, steps=4, threads=1, batch_size=96))
    options.add_argument("--data-root", type=Path)
    options.add_argument("--wall", action="store_true")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    images, _ = splits("cifar10", root=arguments.data_root, fraction=0.1)
    columns = ("per image, images/s", "bare", "trainer", "trainer / per image", "trainer / bare")
    print(header("network", "recipe", *columns))
    for model, name in CASES:
        found = measure(model, name, images, arguments)
        rates = [f"{arguments.batch_size / statistics.median(times):.0f}" for times in found.values()]
        ratios = [
            statistics.median(other / own for other, own in zip(found[column], found["trainer"], strict=True))
            for column in ("per image", "bare")
        ]
        print(row(model, name, *rates, *(f"{ratio:.2f}" for ratio in ratios)), flush=True)


if __name__ == "__main__":
    main()

"""Cost of a monitor in the training of the demo ViT, and its largest eigenvalue against that of `landscape hessian`.

    python benchmarks/monitor.py [--data NAME] [--data-root DIR] [--steps 400] [--every 100] [--samples 64]
        [--threads 1]

Each row is one training by the trainer's own recipe. "every step asked for" measures at every `--every`-th step
whatever it costs; "default" keeps within 2 % of the training time. The share is that of all measurements after the one
at step 0, in wall time, which other load affects in both parts alike. "products" are those of a measurement. "off by"
is the largest relative difference of an eigenvalue from that of `landscape hessian --which LA` with tol 1e-4 at the
same step and batch.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch

import landscape
from landscape import models
from landscape.data.dataset import Batches
from landscape.data.recipes import recipe
from landscape.training.training_set import splits
from landscape.training.updates import Trainer, epoch_updates, with_memory_format


def trained(arguments: argparse.Namespace, overhead: float, *, compared: bool) -> tuple[landscape.Monitor, list[float]]:
    """A monitor after a training, and how far each of its largest eigenvalues was from a full measurement."""
    images, _ = splits(arguments.data, root=arguments.data_root)
    own = {"classes": images.classes, "image_size": images.size}
    settings = with_memory_format(recipe("demo", epochs=100), "vit_demo", own)
    torch.manual_seed(0)
    network = models.build("vit_demo", **own)
    trainer = Trainer.of(network, images, settings, seed=0)
    batch = Batches(images.take(np.arange(arguments.samples)), arguments.samples)[0]
    out = Path(tempfile.mkdtemp()) / "run.h5"
    monitor = landscape.Monitor(
        network, "", batch, every=arguments.every, out=out, overhead=overhead, optimizer=arguments.optimizer(trainer)
    )
    off: list[float] = []
    step = 0
    for epoch in range(1, 101):
        for _ in epoch_updates(trainer, epoch):
            step += 1
            monitor.step(step)
            if compared and step % arguments.every == 0:
                subject = landscape.load(network, data=batch, batch_size=len(batch[1]))
                full = landscape.measure("hessian", subject, out=None, top=1, which="LA", quiet=True)
                found = monitor.data()["eigenvalue"].values[-1, 0]
                off.append(abs(found / full["eigenvalue"].item() - 1))
            if step == arguments.steps:
                return monitor, off
    return monitor, off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| monitor | rows | s at step 0 | s per row | products | share of the training time | off by at most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, overhead, of_optimiser in (
        ("every step asked for", math.inf, False),
        ("every step asked for, optimizer=", math.inf, True),
        ("default", 0.02, False),
    ):
        arguments.optimizer = (lambda trainer: trainer.optimizer) if of_optimiser else (lambda trainer: None)
        monitor, _ = trained(arguments, overhead, compared=False)
        rows = monitor.data()
        seconds, later = rows["seconds"].values, rows["seconds"].values[1:]
        share = later.sum() / monitor._budget.training
        worst = "-"
        if overhead == math.inf:
            worst = f"{100 * max(trained(arguments, overhead, compared=True)[1]):.2f} %"
        cost = f"{seconds[0]:.2f} | {later.mean() if len(later) else math.nan:.3f}"
        products = rows["products"].values[1:]
        print(
            f"| {name} | {len(seconds)} | {cost} | {products.mean() if len(products) else math.nan:.0f} | "
            f"{100 * share:.2f} % | {worst} |"
        )


if __name__ == "__main__":
    main()

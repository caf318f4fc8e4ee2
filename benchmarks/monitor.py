"""Cost of a monitor in the training of the demo ViT, and its largest eigenvalue against that of `landscape hessian`.

    python benchmarks/monitor.py [--data NAME] [--data-root DIR] [--steps 400] [--every 100] [--samples 32,64]
        [--threads 1]

Each row is one training by the trainer's own recipe, measured at every `--every`-th step whatever it costs. Costs are
in process time, which other load affects little, and in steps of the same training (the median one). "Share" is that
of the measurements after the first if every one is made; "rows at 2 %" is how often one is made with the default
overhead, and from which step on, when the first is paid for. "Off by" is the largest relative difference of an
eigenvalue from that of `landscape hessian --which LA` with tol 1e-4 at the same step and batch.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import landscape
from landscape import models
from landscape.data.dataset import Batches
from landscape.data.recipes import recipe
from landscape.training.training_set import splits
from landscape.training.updates import Trainer, epoch_updates, with_memory_format

OVERHEAD = 0.02  # the default


def row(arguments: argparse.Namespace, samples: int, *, with_optimizer: bool) -> str:
    """One training with a monitor that measures whenever it is asked to."""
    images, _ = splits(arguments.data, root=arguments.data_root)
    own = {"classes": images.classes, "image_size": images.size}
    settings = with_memory_format(recipe("demo", epochs=100), "vit_demo", own)
    torch.manual_seed(0)
    network = models.build("vit_demo", **own)
    trainer = Trainer.of(network, images, settings, seed=0)
    batch = Batches(images.take(np.arange(samples)), samples)[0]
    optimizer = trainer.optimizer if with_optimizer else None
    out = Path(tempfile.mkdtemp()) / "run.h5"
    before = time.process_time()
    monitor = landscape.Monitor(
        network, "", batch, every=arguments.every, out=out, overhead=math.inf, optimizer=optimizer
    )
    first, later, steps = time.process_time() - before, list[float](), list[float]()
    off: list[float] = []
    number = 0
    for epoch in range(1, 101):
        before = time.process_time()
        for _ in epoch_updates(trainer, epoch):
            steps.append(time.process_time() - before)
            number += 1
            before = time.process_time()
            monitor.step(number)
            if number % arguments.every == 0:
                later.append(time.process_time() - before)
                subject = landscape.load(network, data=batch, batch_size=samples)
                full = landscape.measure("hessian", subject, out=None, top=1, which="LA", quiet=True)
                off.append(abs(monitor.data()["eigenvalue"].values[-1, 0] / full["eigenvalue"].item() - 1))
            if number == arguments.steps:
                break
            before = time.process_time()
        if number == arguments.steps:
            break
    products, step = monitor.data()["products"].values, float(np.median(steps))
    began, each = first / step, float(np.mean(later)) / step
    return (
        f"| {samples}{', optimizer=' if with_optimizer else ''} | {began:.0f} | {each:.1f} | {products[0]:.0f} | "
        f"{products[1:].mean():.1f} | {100 * each / arguments.every:.1f} % | every {each / OVERHEAD:.0f} from "
        f"{(began + each) / OVERHEAD:.0f} on | {100 * max(off):.2f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--samples", default="32,64")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        "| samples | first row, steps | a row, steps | products, first | later | share | rows at 2 % | off by at most |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for samples in map(int, arguments.samples.split(",")):
        for with_optimizer in (False, True):
            print(row(arguments, samples, with_optimizer=with_optimizer), flush=True)


if __name__ == "__main__":
    main()

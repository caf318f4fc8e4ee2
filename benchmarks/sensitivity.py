"""Cost of the sensitivity of all layers of a ResNet-50 to quantisation, against complete passes of perturbed networks.

    OMP_NUM_THREADS=1 python benchmarks/sensitivity.py [--samples 256] [--batch-size 64] [--image-size 64] [--vectors 4]

The naive way perturbs the weights of each layer at each bit-width, runs all samples through the whole network and
restores the weights; it knows neither all layers together nor a predictor. Both run in turns, one mini-batch at a time,
and their process time is compared. The loss increases of both must agree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from measuring import header, parser, row, seconds
from torch import nn

from landscape.probe import Unit
from landscape.probes.sensitivity import Sensitivity
from landscape.subject import outputs
from landscape.subject.outputs import intact_per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.weight_units import changed_weights, with_weights


def network(*, samples: int, batch_size: int, size: int) -> Subject:
    """Torchvision's ResNet-50 at random weights on random images, its norms with the statistics of some of them."""
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model: nn.Module = resnet50()
    images, targets = torch.randn(samples, 3, size, size), torch.randint(1000, (samples,))
    model.train()
    with torch.no_grad():
        model(images[:batch_size])
    return Subject(model.eval(), list(zip(images.split(batch_size), targets.split(batch_size), strict=True)))


def naive(probe: Sensitivity, subject: Subject, batch: int) -> np.ndarray:
    """Sum of the loss of one mini-batch after every perturbation, (setting, unit)."""
    units, settings = probe._units(subject), probe._settings()
    inputs, targets = subject.batch(batch)
    found = np.empty((len(settings), len(units)))
    for s, setting in enumerate(settings):
        for i, unit in enumerate(units):
            weights, _ = changed_weights(subject, unit.pieces, setting.applied)
            with with_weights(subject, weights), subject.evaluating():
                found[s, i] = outputs.loss_and_correctness(subject, inputs, targets)[0].sum().item()
    return found


def swept(probe: Sensitivity, subject: Subject, units: list[Unit]) -> list[float]:
    """Sums of the loss increase as the probe measures them, NaN for random vectors."""
    return [values["loss_increase_sum"] for values in probe.sweep(subject, units)]


def main() -> None:
    made = parser(__doc__, samples=256, batch_size=64, image_size=64, bits="8,6,4,3,2", vectors=4)
    given = made.parse_args()
    subject = network(samples=given.samples, batch_size=given.batch_size, size=given.image_size)
    probe = Sensitivity(bits=given.bits, vectors=given.vectors)
    plan = probe.plan(subject)
    settings, units = len(plan.axes["setting"]), len(plan.axes["unit"])
    start, _ = intact_per_sample(subject)
    took = {"naive": 0.0, "probe": 0.0, "its predictor": 0.0}
    largest = 0.0

    def timed(name: str, work: Callable[[], object]) -> None:
        took[name] += seconds(work)

    for batch, own in enumerate(start.split(given.batch_size)):
        pending = [unit for unit in plan.units() if unit.index[0] == batch]
        long: list[np.ndarray] = []
        short: list[float] = []
        timed("naive", lambda batch=batch, long=long: long.append(naive(probe, subject, batch)))
        perturbed = [unit for unit in pending if unit.index[1] < settings]
        timed("probe", lambda units=perturbed, short=short: short.extend(swept(probe, subject, units)))
        vectors = [unit for unit in pending if unit.index[1] >= settings]
        timed("its predictor", lambda units=vectors: swept(probe, subject, units))
        single = np.array(short).reshape(settings, units + 1)[:, 1:]
        largest = max(largest, float(np.abs(long[0] - own.sum().item() - single).max()) / len(own))
        print(f"mini-batch {batch}: {', '.join(f'{n} {t:.0f} s' for n, t in took.items())}", flush=True)
    print(f"{units} layers, {settings} bit-widths, {len(subject)} images; largest difference {largest:.1e} nats")
    print(header("way", "process seconds", "share of the naive way"))
    for name, spent in (*took.items(), ("probe and predictor", took["probe"] + took["its predictor"])):
        print(row(name, f"{spent:.1f}", f"{spent / took['naive']:.3f}"))


if __name__ == "__main__":
    main()

"""Cost of the sensitivity of all layers of a ResNet-50 to quantisation, against complete passes of perturbed networks.

    OMP_NUM_THREADS=1 python benchmarks/sensitivity.py [--samples 256] [--batch-size 64] [--image-size 64] [--vectors 4]

The naive way is one complete pass over the same samples per layer and bit-width, between quantising the weights of the
layer once and restoring them, with the same functions and mini-batches; both are part of its time. It knows neither all
layers together, which the probe measures too, nor a predictor, whose Hessian products are listed by themselves. Both
run in turns, one mini-batch at a time, and their process time is compared. The loss increases of both must agree.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from measuring import header, parser, row, seconds
from torch import nn

from landscape.models.libraries import library
from landscape.probe import Unit
from landscape.probes.sensitivity import Sensitivity, resume_points
from landscape.subject import outputs
from landscape.subject.outputs import intact_per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.weight_units import changed_weights, with_weights


def network(*, samples: int, batch_size: int, size: int) -> Subject:
    """Torchvision's ResNet-50 at random weights on random images, its norms with the statistics of some of them."""
    torch.manual_seed(0)
    model: nn.Module = library("torchvision").models.resnet50()
    images, targets = torch.randn(samples, 3, size, size), torch.randint(1000, (samples,))
    model.train()
    with torch.no_grad():
        model(images[:batch_size])
    return Subject(model.eval(), list(zip(images.split(batch_size), targets.split(batch_size), strict=True)))


def naive(probe: Sensitivity, subject: Subject, batch: int) -> tuple[np.ndarray, float, float]:
    """Sum of the loss of one mini-batch after every perturbation, (setting, unit); seconds of passes and of the rest.

    The rest perturbs and restores weights, which a naive study of several mini-batches does once.
    """
    units, settings = probe._units(subject), probe._settings()
    inputs, targets = subject.batch(batch)
    found = np.empty((len(settings), len(units)))
    passes, start = 0.0, time.process_time()
    for s, setting in enumerate(settings):
        for i, unit in enumerate(units):
            weights, _ = changed_weights(subject, unit.pieces, setting.applied)
            with with_weights(subject, weights), subject.evaluating():
                before = time.process_time()
                found[s, i] = outputs.loss_and_correctness(subject, inputs, targets)[0].sum().item()
                passes += time.process_time() - before
    return found, passes, time.process_time() - start - passes


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
    took = dict.fromkeys(("naive: passes", "naive: weights", "probe", "its verification", "its predictor"), 0.0)
    took["its verification"] = seconds(lambda: resume_points(subject, probe._units(subject)))
    largest = 0.0
    for batch, own in enumerate(start.split(given.batch_size)):
        pending = [unit for unit in plan.units() if unit.index[0] == batch]
        long, passes, weights = naive(probe, subject, batch)
        took["naive: passes"] += passes
        took["naive: weights"] = took["naive: weights"] or weights
        short: list[float] = []
        perturbed = [unit for unit in pending if unit.index[1] < settings]
        took["probe"] += seconds(lambda units=perturbed, short=short: short.extend(swept(probe, subject, units)))
        vectors = [unit for unit in pending if unit.index[1] >= settings]
        took["its predictor"] += seconds(lambda units=vectors: swept(probe, subject, units))
        single = np.array(short).reshape(settings, units + 1)[:, 1:]
        largest = max(largest, float(np.abs(long - own.sum().item() - single).max()) / len(own))
        print(f"mini-batch {batch}: {', '.join(f'{n} {t:.1f} s' for n, t in took.items())}", flush=True)
    print(f"{units} layers, {settings} bit-widths, {len(subject)} images; largest difference {largest:.1e} nats")
    alone, verified = took["naive: passes"] + took["naive: weights"], took["probe"] + took["its verification"]
    print(header("way", "process seconds", "share of the naive way"))
    rows = {**took, "naive": alone, "probe and verification": verified,
            "probe, verification and predictor": verified + took["its predictor"],
            "naive and the same predictor": alone + took["its predictor"]}  # fmt: skip
    for name, spent in rows.items():
        print(row(name, f"{spent:.1f}", f"{spent / alone:.3f}"))


if __name__ == "__main__":
    main()

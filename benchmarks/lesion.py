"""Cost of a lesion study, against one complete forward pass per unit and one of the intact network.

    python benchmarks/lesion.py [--samples 256] [--batch-size 64] [--image-size 32] MODEL...

Counts the floating-point operations that run (torch's counter) and process time, of the study as the probe runs it and
with complete forward passes under the same hooks. The results must agree to the bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from landscape import models
from landscape.layers.partial_forward import Cache, ResumePoint, advance, resumed
from landscape.layers.unit_removal import Group, removed
from landscape.probe import Values
from landscape.probes import lesion
from landscape.probes.lesion import Lesion
from landscape.subject.outputs import intact, outputs_of, per_sample
from landscape.subject.subject import Subject

MODELS = ("resnet_demo", "vit_demo", "alternet_demo", "resnet18", "preresnet50", "alternet50", "vit_ti")


def subject_of(name: str, size: int, samples: int, batch_size: int) -> Subject:
    torch.manual_seed(0)
    model = models.build(name, classes=100, image_size=size).eval()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, size, size, generator=generator)
    targets = torch.randint(100, (samples,), generator=generator)
    pairs = zip(inputs.split(batch_size), targets.split(batch_size), strict=True)
    return Subject(model, list(pairs))


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """Floating-point operations and process time, of two runs, as counting takes time."""
    with FlopCounterMode(display=False) as counter:
        work()
    start = time.process_time()
    work()
    return float(counter.get_total_flops()), time.process_time() - start


def study(subject: Subject, units: list[int], *, complete: bool) -> list[Values]:
    """Values of some units, by complete forward passes if `complete`."""
    probe = Lesion()
    wanted = [unit for unit in probe.plan(subject).units() if unit.index[1] in units]
    with ExitStack() as stack:
        if complete:
            start = patch.object(lesion.Lesion, "_resume_point", lambda self, subject, group: ResumePoint())
            stack.enter_context(start)
        return list(probe.sweep(subject, wanted))


def cached_outputs(subject: Subject, group: Group) -> Cache:
    """Outputs of the modules before a unit, for the first mini-batch."""
    return advance(subject.model, subject.batch(0)[0], Lesion()._resume_point(subject, group), {})


def resumed_pass(subject: Subject, group: Group, cache: Cache) -> torch.Tensor:
    """The first mini-batch from a unit onwards, without the unit."""
    with torch.inference_mode(), removed(subject.model, *group.units), resumed(subject.model, cache):
        return outputs_of(subject.model, subject.batch(0)[0])


def row(name: str, subject: Subject) -> str:
    groups = Lesion()._groups(subject)
    count, every = len(groups), list(range(len(groups)))
    intact(subject)
    for group in groups:  # found and verified once, on two images
        Lesion()._resume_point(subject, group)
    one_flops, one_time = measured(lambda: per_sample(subject))
    flops, seconds = measured(lambda: study(subject, every, complete=False))
    late = [(group, cached_outputs(subject, group)) for group in groups[-max(1, count // 4) :]]
    late_flops = sum(measured(lambda unit=unit: resumed_pass(subject, *unit))[0] for unit in late)
    batch_flops = measured(lambda: subject.model(subject.batch(0)[0]))[0]
    long_flops, long_time = measured(lambda: study(subject, every, complete=True))
    same = study(subject, every, complete=False) == study(subject, every, complete=True)
    passes, spent = 1 + flops / one_flops, 1 + seconds / one_time
    return (
        f"| {name} | {count} | {passes:.2f} | {spent:.2f} | {1 + long_flops / one_flops:.2f} | "
        f"{1 + long_time / one_time:.2f} | {late_flops / len(late) / batch_flops:.2f} | {'yes' if same else 'NO'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=32)
    given = parser.parse_args()
    print(
        "| network | units U | passes, by operations | by time | long way, operations | time | late | bits agree |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in given.models:
        print(row(name, subject_of(name, given.image_size, given.samples, given.batch_size)), flush=True)


if __name__ == "__main__":
    main()

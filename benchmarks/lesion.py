"""What a lesion study costs against one full forward pass per unit and one for the intact network.

    python benchmarks/lesion.py [--samples 256] [--batch-size 64] [--image-size 32] MODEL...

Counts floating-point operations (torch's own counter, so that only what runs is counted) and process time, of the study
as the probe runs it and of the long way: the same hooks, every pass from the start. The results must agree to the bit.
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
from landscape.layers.partial_forward import Kept, Prefix, advanced, resumed
from landscape.layers.unit_removal import removed
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
    """Floating-point operations and process time, in two runs: counting costs time."""
    with FlopCounterMode(display=False) as counter:
        work()
    start = time.process_time()
    work()
    return float(counter.get_total_flops()), time.process_time() - start


def study(subject: Subject, units: list[int], *, whole: bool) -> list[Values]:
    """The answers for some units, by the long way if `whole`."""
    probe = Lesion()
    wanted = [unit for unit in probe.plan(subject).units() if unit.index[1] in units]
    with ExitStack() as stack:
        if whole:
            stack.enter_context(patch.object(lesion.Lesion, "_prefix", lambda self, subject, i: Prefix()))
        return list(probe.sweep(subject, wanted))


def prefix_outputs(subject: Subject, i: int) -> Kept:
    """What comes before a unit, of the first mini-batch."""
    return advanced(subject.model, subject.batch(0)[0], Lesion()._prefix(subject, i), {})


def suffix(subject: Subject, i: int, kept: Kept) -> torch.Tensor:
    """The first mini-batch from a unit onwards, without the unit."""
    parts = Lesion()._groups(subject)[i].parts
    with torch.inference_mode(), removed(subject.model, *parts), resumed(subject.model, kept):
        return outputs_of(subject.model, subject.batch(0)[0])


def row(name: str, subject: Subject) -> str:
    count = len(Lesion()._groups(subject))
    every = list(range(count))
    intact(subject)
    for i in every:  # found and proven once, on two images
        Lesion()._prefix(subject, i)
    one_flops, one_time = measured(lambda: per_sample(subject))
    flops, seconds = measured(lambda: study(subject, every, whole=False))
    late = every[-max(1, count // 4) :]
    kept = [prefix_outputs(subject, i) for i in late]
    late_flops = sum(measured(lambda i=i, k=k: suffix(subject, i, k))[0] for i, k in zip(late, kept, strict=True))
    batch_flops = measured(lambda: subject.model(subject.batch(0)[0]))[0]
    long_flops, long_time = measured(lambda: study(subject, every, whole=True))
    same = study(subject, every, whole=False) == study(subject, every, whole=True)
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

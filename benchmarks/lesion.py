"""Cost of a lesion study, against one complete forward pass per unit and one of the intact network.

    python benchmarks/lesion.py [--samples 256] [--batch-size 64] [--image-size 32] MODEL...

Counts the floating-point operations that run (torch's counter) and process time, of the study as the probe runs it and
with complete forward passes under the same hooks. The results must agree to the bit.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch
from measuring import Work, header, parser, row, seconds, untrained
from torch.utils.flop_counter import FlopCounterMode

from landscape.layers.partial_forward import Cache, ResumePoint, advance, resumed
from landscape.layers.unit_removal import Group, removed
from landscape.probe import Values
from landscape.probes import lesion
from landscape.probes.lesion import Lesion
from landscape.subject.outputs import intact_per_sample, outputs_of, per_sample
from landscape.subject.subject import Subject

MODELS = ("resnet_demo", "vit_demo", "alternet_demo", "resnet18", "preresnet50", "alternet50", "vit_ti")


def measured(work: Work) -> tuple[float, float]:
    """Floating-point operations and process time, of two runs, as counting takes time."""
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops()), seconds(work)


def study(subject: Subject, units: list[int], *, complete: bool) -> list[Values]:
    """Values of some units, by complete forward passes if `complete`."""
    probe = Lesion()
    wanted = [unit for unit in probe.plan(subject).units() if unit.index[1] in units]
    with ExitStack() as stack:
        if complete:
            start = patch.object(lesion, "resume_points", lambda subject, groups: [ResumePoint()] * len(groups))
            stack.enter_context(start)
        return list(probe.sweep(subject, wanted))


def cached_outputs(subject: Subject, group: Group) -> Cache:
    """Outputs of the modules before a unit, for the first mini-batch."""
    (point,) = lesion.resume_points(subject, [group])
    with torch.inference_mode():
        return advance(subject.model, subject.batch(0)[0], point, {})


def resumed_pass(subject: Subject, group: Group, cache: Cache) -> torch.Tensor:
    """The first mini-batch from a unit onwards, without the unit."""
    with torch.inference_mode(), removed(subject.model, *group.units), resumed(subject.model, cache):
        return outputs_of(subject.model, subject.batch(0)[0])


def study_of(name: str, subject: Subject) -> str:
    groups = Lesion()._groups(subject)
    count, every = len(groups), list(range(len(groups)))
    intact_per_sample(subject)
    lesion.resume_points(subject, groups)  # found and verified once, on two images
    one_flops, one_time = measured(lambda: per_sample(subject))
    flops, spent = measured(lambda: study(subject, every, complete=False))
    late = [(group, cached_outputs(subject, group)) for group in groups[-max(1, count // 4) :]]
    late_flops = sum(measured(lambda unit=unit: resumed_pass(subject, *unit))[0] for unit in late)
    batch_flops = measured(lambda: subject.model(subject.batch(0)[0]))[0]
    long_flops, long_time = measured(lambda: study(subject, every, complete=True))
    same = study(subject, every, complete=False) == study(subject, every, complete=True)
    passes = [1 + found / one_flops for found in (flops, long_flops)]
    times = [1 + found / one_time for found in (spent, long_time)]
    numbers = (passes[0], times[0], passes[1], times[1], late_flops / len(late) / batch_flops)
    return row(name, count, *(f"{number:.2f}" for number in numbers), "yes" if same else "NO")


def main() -> None:
    arguments = parser(__doc__, samples=256, batch_size=64, image_size=32)
    arguments.add_argument("models", nargs="*", default=list(MODELS))
    given = arguments.parse_args()
    columns = "network, units U, passes by operations, by time, long way by operations, by time, late, bits agree"
    print(header(*columns.split(", ")))
    for name in given.models:
        sizes = {"size": given.image_size, "samples": given.samples, "batch_size": given.batch_size}
        print(study_of(name, untrained(name, classes=100, **sizes)), flush=True)


if __name__ == "__main__":
    main()

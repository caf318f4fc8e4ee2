"""What the study layer costs beside its steps, and what a second worker saves: `python benchmarks/studies.py [EPOCHS]`.

A study of equal steps, six trainings and six measurements, in CPU time, which other work on the machine changes little:
with two workers that of the parent, which the workers wait for, and half of that of the workers.
"""

import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from landscape.api import names_of_results
from landscape.cli.study import carry_out, workers_of
from landscape.cli.training import run_training
from landscape.studies.study_file import study_of

STUDY = {
    "data": "digits", "train": {"model": "vit_demo", "args": {"patch": 4}, "seeds": 6}, "networks": {"a": {}},
    "measure": {"trace": {"samples": 256, "vectors": 8}}, "numbers": {"sum": "trace.trace"},
}  # fmt: skip


def cpu(who: int = resource.RUSAGE_SELF) -> float:
    """CPU seconds of this process, or of the workers that have ended."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def measured(workers: int, epochs: int) -> dict[str, float]:
    """Seconds of a study: on the clock, in this process, in its steps if they run here, and in each worker."""
    study, of_steps = study_of(STUDY, names_of_results, changes={"train": {"epochs": epochs}}), [0.0]

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            before = cpu()
            found = function(*arguments, **options)
            of_steps[0] += cpu() - before
            return found

        return call

    began, own, others = time.monotonic(), cpu(), cpu(resource.RUSAGE_CHILDREN)
    with TemporaryDirectory() as folder, workers_of(study, workers, device="cpu") as how:
        if workers == 1:
            how |= {"train": counted(run_training), "measure": counted(how["measure"])}
        carry_out(study, Path(folder), **how, device="cpu", quiet=True)
    each = (cpu(resource.RUSAGE_CHILDREN) - others) / workers
    return {"clock": time.monotonic() - began, "here": cpu() - own, "steps": of_steps[0], "worker": each}


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    one, two = measured(1, epochs), measured(2, epochs)
    print(f"one worker: {one['here']:.1f} s, of it steps {one['steps']:.1f} s: the layer takes "
          f"{100 * (one['here'] / one['steps'] - 1):.2f} %; on the clock {one['clock']:.0f} s")  # fmt: skip
    both = two["worker"] + two["here"]
    print(f"two workers: {two['worker']:.1f} s each and {two['here']:.1f} s here, {one['here'] / both:.2f} times as "
          f"fast; on the clock {two['clock']:.0f} s, {one['clock'] / two['clock']:.2f} times")  # fmt: skip

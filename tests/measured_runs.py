"""Networks, probes and executors of tests of runs: snapshots on digits, chunks in threads, results to compare."""

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch

from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.probe import Probe, Unit, Values
from landscape.probes import probe_class
from landscape.results import group as groups
from landscape.results.run_key import Arrays, Outcome
from landscape.running import local_processes
from landscape.running.executor import Executor
from landscape.running.local_processes import Processes
from landscape.running.work import measure_chunk, work_of
from landscape.subject import subject
from landscape.subject.loading import load as loading

# What takes more than half a second with the smallest parameters of the probe.
KEPT = {"hvp": "double-backward"}  # recorded products are compared with these elsewhere
FASTER: Mapping[str, Mapping[str, Any]] = {
    "convexity": {"max_products": 4}, "hessian": KEPT, "density": KEPT, "flatness": {"steps": 1, **KEPT},
    "sensitivity": {"bits": "4"}, "input-surface": {"images": 2}, "tokens": {"images": 1},
}  # fmt: skip
ARGUMENTS = {"blocks": (1,), "width": 4}


def with_snapshots(folder: Path) -> Path:
    """A run of three snapshots; beside it a network with attention."""
    for epoch, name in enumerate(("init", "epoch_001", "final")):
        save(folder / f"{name}.pt", seed=epoch)
    attending(folder).mkdir()
    torch.manual_seed(0)
    arguments = {"classes": 10, "image_size": 16, "depth": 1}
    weights = models.build("vit_demo", **arguments).state_dict()
    save(attending(folder) / "final.pt", seed=0, model="vit_demo", model_args=arguments, state_dict=weights)
    return folder


class Threads:
    """Chunks as a worker of dask with two threads measures them."""

    here, workers = False, 2

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))

    def measure(self, probe: Any, subject: subject.Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        work, size = work_of(probe, subject), max(1, len(units) // 8)
        chunks = [units[i : i + size] for i in range(0, len(units), size)]
        for chunk, found in zip(chunks, self.pool.map(lambda chunk: measure_chunk(work, chunk), chunks), strict=True):
            yield from ((unit, values) for unit, (_, values) in zip(chunk, found, strict=True))


class Forked(Processes):
    """Processes that are forked from one that has imported torch."""

    def _start_missing(self, count: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_processes, "subprocess", forked)
            super()._start_missing(count)


@contextmanager
def threads_and_processes() -> Iterator[Mapping[str, Executor]]:
    threads = Threads()
    with threads.pool, Forked(1) as processes:
        yield {"threads": threads, "processes": processes}


def save(path: Path, *, seed: int = 0, classes: int = 10, **changed: Any) -> Path:
    """A checkpoint of a tiny residual network with random weights."""
    torch.manual_seed(seed)
    arguments: dict[str, Any] = {"classes": classes, "image_size": 16, **ARGUMENTS}
    content = {
        "model": "resnet_demo", "model_args": arguments, "data": {"name": "digits"}, "epoch": float(seed), "seed": seed,
        "recipe": {"crop": 2, "flip": True}, "metrics": {},
    }  # fmt: skip
    if "state_dict" not in changed:
        content["state_dict"] = models.build("resnet_demo", **arguments).state_dict()
    write_checkpoint(path, **{**content, **changed})
    return path


def attending(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-attending")


def loaded(folder: Path, **options: Any) -> subject.Subject:
    return loading.load(folder / "final.pt", **{"data": "digits", "samples": 32, "batch_size": 8, **options})


def small(name: str, **parameters: Any) -> Probe:
    made: Probe = probe_class(name)(**{**probe_class(name).smallest, **parameters})
    return made


def stored_result(path: Path, outcome: Outcome) -> Arrays:
    return groups.read_group(path, outcome.group)


def assert_same(found: Arrays, wanted: Arrays) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def stop_after(units: int) -> Callable[[int, int], None]:
    """A report that presses Ctrl-C."""

    def report(done: int, total: int) -> None:
        if done == units:
            signal.raise_signal(signal.SIGINT)

    return report

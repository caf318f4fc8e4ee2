"""Networks, probes and executors of tests of runs: snapshots on digits, chunks in threads, results to compare."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.executors.executor import Executor
from landscape.executors.local_processes import Processes
from landscape.executors.work import measure_chunk, work_of
from landscape.probe import Probe, Unit, Values
from landscape.probes import probe_class
from landscape.results import group as groups
from landscape.results.run_key import Arrays, Outcome
from landscape.subject import loading, subject

ARGUMENTS = {"blocks": (1, 1), "width": 8}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers: sums in another order have other last bits
    yield
    torch.set_num_threads(before)


def with_snapshots(folder: Path) -> Path:
    """A run of three snapshots; beside it a network that attends."""
    for epoch, name in enumerate(("init", "epoch_001", "final")):
        save(folder / f"{name}.pt", seed=epoch)
    attending(folder).mkdir()
    torch.manual_seed(0)
    arguments = {"classes": 10, "image_size": 16, "depth": 2}
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


@contextmanager
def threads_and_processes() -> Iterator[Mapping[str, Executor]]:
    threads = Threads()
    with threads.pool, Processes(2) as processes:
        yield {"threads": threads, "processes": processes}


def save(path: Path, *, seed: int, **changed: Any) -> Path:
    torch.manual_seed(seed)
    model = models.build("resnet_demo", classes=10, image_size=16, **ARGUMENTS)
    content = {
        "model": "resnet_demo",
        "model_args": {"classes": 10, "image_size": 16, **ARGUMENTS},
        "state_dict": model.state_dict(),
        "data": {"name": "digits"},
        "recipe": {"crop": 2, "flip": True},
        "epoch": float(seed),
        "metrics": {},
        "seed": seed,
    }
    write_checkpoint(path, **{**content, **changed})
    return path


def attending(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-attending")


def fitting(name: str, folder: Path) -> subject.Subject:
    """The network that a probe is tried on."""
    return loaded(attending(folder) if name.startswith("attention") else folder)


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

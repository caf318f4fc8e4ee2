"""Kill workers with SIGKILL while they measure, and count what that cost: nothing may be lost, doubled or different.

    python benchmarks/kill_workers.py [--local 30] [--dask 30] [--probes surface,hessian] [--seed 0]

Every probe is measured in this process first, then with two workers of which random ones are killed at random moments,
up to three per run: most while they measure, some while they load. The run itself replaces a dead local worker. One of
dask is started again by its nanny; every third time the nanny is killed with it, as with a machine that is gone, and
the campaign adds another worker, as a batch system does. Nobody restarts the run: it must end by itself, every unit
must have been handed over exactly once, and the results file must be that of the run in this process, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dask_commands import Cluster, children
from fault_checks.commands import checkpoint as small
from fault_checks.commands import same

from landscape.probe import Unit
from landscape.probes import probe_class
from landscape.results.writer import Writer
from landscape.running.executor import Executor
from landscape.running.local_processes import Processes
from landscape.running.run import run
from landscape.subject.loading.load import load

MOST = 3  # kills of one run: more could hit a unit that is measured alone, which counts as one that kills its workers
PROBES: Mapping[str, tuple[dict[str, Any], int, int]] = {  # parameters, samples, batch size: some seconds of work each
    "surface": ({"resolution": "9"}, 64, 32), "hessian": ({"top": 1, "batches": 16, "max_products": 10}, 128, 8),
    "trace": ({}, 128, 8), "fourier": ({}, 320, 2), "lesion": ({}, 320, 4), "perturbation": ({}, 320, 16),
}  # fmt: skip


@dataclass
class Count:
    """What happened in one campaign."""

    kills: int = 0
    measuring: int = 0  # of them while the worker had units
    runs: int = 0
    units: int = 0
    lost: int = 0  # units that a run left out
    twice: int = 0  # units that were handed over again
    wrong: int = 0  # runs with other numbers
    ended: int = 0  # runs that ended by an error

    def line(self, what: str) -> str:
        """A row of the table."""
        return f"| {what} | {' | '.join(str(value) for value in vars(self).values())} |"


@dataclass
class Target:
    """An executor, and how one of its workers is killed: at random among those that are there."""

    executor: Any
    kill: Callable[[random.Random], bool | None]  # whether the worker was measuring; None: there was none
    loaded: Callable[[], bool]  # whether any worker can be measuring


@contextlib.contextmanager
def local() -> Iterator[Target]:
    """Two processes of this machine."""
    with Processes(2) as executor:

        def kill(moments: random.Random) -> bool | None:
            workers = list(executor._workers)
            if not workers:
                return None
            worker = moments.choice([worker for worker in workers if worker.ready] or workers)
            measuring = worker.ready and worker.busy
            worker.process.send_signal(signal.SIGKILL)
            return measuring

        yield Target(executor, kill, lambda: bool(executor.ready()))


@contextlib.contextmanager
def dask(cluster: Cluster) -> Iterator[Target]:
    """Two workers of a scheduler."""
    from landscape.running.dask_cluster import DaskCluster

    with DaskCluster(str(cluster.file)) as executor:

        def kill(moments: random.Random) -> bool | None:
            nannies = [process for process in cluster.processes[1:] if process.poll() is None]
            pairs = [(nanny, worker) for nanny in nannies for worker in children(nanny.pid)[:1]]
            if not pairs:
                return None
            nanny, worker = moments.choice(pairs)
            measuring = any(executor._client.processing().values())
            if moments.random() < 1 / 3:
                nanny.kill()
                nanny.wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            return measuring

        over = threading.Event()
        batch_system = threading.Thread(target=replacing, args=(cluster, over))
        batch_system.start()
        try:
            yield Target(executor, kill, lambda: True)
        finally:
            over.set()
            batch_system.join()


def replacing(cluster: Cluster, over: threading.Event) -> None:
    """Start another worker for each whose nanny is gone, also because its worker was killed while it started."""
    while not over.wait(0.5):
        for _ in range(2 - sum(process.poll() is None for process in cluster.processes[1:])):
            cluster.worker()


class Killer(threading.Thread):
    """Kills workers of a run at random moments until the run has ended."""

    def __init__(self, target: Target, kills: int, seconds: float, moments: random.Random) -> None:
        super().__init__(daemon=True)
        self.target, self.left, self.seconds, self.moments = target, kills, seconds, moments
        self.ended = threading.Event()
        self.measuring: list[bool] = []  # one per kill

    def run(self) -> None:
        """Wait until a worker can be measuring, or, one time in five, for no such thing; then for a random moment."""
        while self.left:
            early = self.moments.random() < 0.2
            while not early and not self.target.loaded():
                if self.ended.wait(0.02):
                    return
            if self.ended.wait(self.moments.uniform(0.0, self.seconds / 2)):
                return
            measuring = self.target.kill(self.moments)
            if measuring is not None:
                self.measuring.append(measuring)
                self.left -= 1


@contextlib.contextmanager
def handed_over() -> Iterator[Counter[tuple[int, ...]]]:
    """How often each unit is written."""
    found, write = Counter[tuple[int, ...]](), Writer.write

    def counted(self: Writer, unit: Unit, values: Any) -> None:
        found[unit.index] += 1
        write(self, unit, values)

    Writer.write = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Writer.write = write  # type: ignore[method-assign]


def campaign(
    checkpoint: Path, name: str, kills: int, target: Callable[[], Any], moments: random.Random, count: Count
) -> None:
    """So many kills while a probe is measured, in as many runs as that takes."""
    parameters, samples, batch_size = PROBES[name]
    probe = probe_class(name)(**{**probe_class(name).smallest, **parameters})

    def measure(path: Path, **how: Any) -> Counter[tuple[int, ...]]:
        with handed_over() as units:
            run(probe, load(checkpoint, data="digits", samples=samples, batch_size=batch_size), path, **how)
        return units

    with tempfile.TemporaryDirectory() as temporary:
        start = time.monotonic()
        wanted = set(measure(Path(temporary, "whole.h5")))
        seconds = time.monotonic() - start
        while kills:
            path = Path(temporary, f"results-{count.runs}.h5")
            count.runs += 1
            units: Counter[tuple[int, ...]] = Counter()
            with target() as found:
                executor: Executor = found.executor
                killer = Killer(found, min(kills, moments.randint(1, MOST)), seconds, moments)
                killer.start()
                try:
                    units = measure(path, executor=executor)
                except Exception as error:
                    count.ended += 1
                    logging.warning("a run ended: %s: %s", type(error).__name__, error)
                killer.ended.set()
                killer.join()
            kills -= len(killer.measuring)
            count.kills += len(killer.measuring)
            count.measuring += sum(killer.measuring)
            count.units += len(wanted)
            count.lost += len(wanted - set(units))
            count.twice += units.total() - len(units)
            count.wrong += not path.exists() or not same(path, Path(temporary, "whole.h5"))
            count.wrong += {
                file.name for file in path.parent.iterdir() if file.name.startswith(f"{path.name}.")
            } != set()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("local", 30), ("dask", 30), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--probes", default=",".join(PROBES))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("landscape").setLevel(logging.ERROR)
    moments, total = random.Random(chosen.seed), Count()
    print(f"| what | {' | '.join(re.sub('_', ' ', name) for name in vars(total))} |")
    print("|" + " --- |" * (1 + len(vars(total))), flush=True)
    names = chosen.probes.split(",")

    def campaigns(what: str, kills: int, checkpoint: Path, target: Callable[[], Any]) -> None:
        for number, name in enumerate(names if kills else ()):
            share, count = kills * (number + 1) // len(names) - kills * number // len(names), Count()
            campaign(checkpoint, name, share, target, moments, count)
            print(count.line(f"{name}, {what}"), flush=True)
            for field, value in vars(count).items():
                setattr(total, field, getattr(total, field) + value)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        checkpoint = small(Path(temporary), snapshots=("init", "final"), blocks=(1, 1), width=48)
        campaigns("two local workers", chosen.local, checkpoint, local)
        if chosen.dask:
            with Cluster(Path(temporary)) as cluster:
                for _ in range(2):
                    cluster.worker()
                campaigns("two workers of dask", chosen.dask, checkpoint, lambda: dask(cluster))
    print(total.line("all"))
    raise SystemExit(1 if total.lost or total.twice or total.wrong or total.ended else 0)


if __name__ == "__main__":
    main()

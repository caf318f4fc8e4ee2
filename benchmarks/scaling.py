"""What many workers cost: time and bytes per unit of every executor, speed of two local workers, and a simulation.

    python benchmarks/scaling.py [--parts overhead dask bytes writer merge simulation speed] [--units 2000]
        [--checkpoint final.pt] [--data cifar10] [--data-root DIR]

`overhead`, `dask`: wall time of a run of units that take no time, into a results file, per unit. `bytes`: what travels.
`writer`: units per second that one process writes. `merge`: CPU time of joining 100 shards. `simulation`: 10,000 units
on 1 to 1,000 workers, see `simulated_workers.py`. `speed`: two local workers against one process with one thread, in
turns, on a trained network (only with `--checkpoint`), by wall and by CPU time, once all have loaded.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = str(FOLDER)  # workers import the probe of this file
PARTS = ("overhead", "dask", "bytes", "writer", "merge", "simulation")
WORKERS = (1, 10, 30, 100, 300, 1000)


def progress_of(probe: Any, subject: Any, path: Path | None, executor: Any) -> tuple[float, float]:
    """Wall time of a run, and the rest of it from its second unit on."""
    from landscape.running.run import run

    times: list[float] = []
    start = time.perf_counter()
    run(probe, subject, path, executor=executor, report=lambda done, total: times.append(time.perf_counter()))
    return time.perf_counter() - start, (times[-1] - times[1]) / (len(times) - 2)


@contextmanager
def local_dask(workers: int) -> Iterator[str]:
    """A scheduler and workers on the loopback interface; its scheduler file."""
    from dask_commands import Cluster

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Cluster(Path(folder)) as cluster:
        for _ in range(workers):
            cluster.worker()
        yield str(cluster.file)


def small_subject(folder: str) -> Any:
    """A network of 8,000 parameters that any process can load."""
    import landscape

    code = "import torch\ndef net():\n    torch.manual_seed(0)\n"
    code += "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 10))\n"
    Path(folder, "net.py").write_text(code)
    return landscape.load(model=f"{folder}/net.py:net", data="digits", samples=16, batch_size=16)


def overhead(arguments: argparse.Namespace) -> None:
    from idle_probe import Idle

    from landscape.running.executor import IN_PROCESS
    from landscape.running.local_processes import Processes

    with tempfile.TemporaryDirectory() as folder, Processes(2) as processes:
        subject, out = small_subject(folder), Path(folder, "results.h5")
        for name, executor in (("in this process", IN_PROCESS), ("two local workers", processes)):
            _, each = progress_of(Idle(units=arguments.units, label=name), subject, out, executor)
            print(f"| {name} | {each * 1e3:.3f} |", flush=True)


def dask(arguments: argparse.Namespace) -> None:
    from idle_probe import Idle

    from landscape.running import dask_cluster
    from landscape.running.dask_cluster import DaskCluster

    with tempfile.TemporaryDirectory() as folder, local_dask(2) as file, DaskCluster(file) as cluster:
        subject, out = small_subject(folder), Path(folder, "results.h5")
        progress_of(Idle(units=4, label="loading"), subject, out, cluster)
        for seconds in (0.0, 0.01, 0.1):
            count = arguments.units if seconds < 0.1 else arguments.units // 10
            probe = Idle(units=count, seconds=seconds, label=f"dask {seconds}")
            wall, _ = progress_of(probe, subject, out, cluster)
            each = wall / count - seconds / 2
            print(f"| dask, two workers, units of {seconds:g} s | {each * 1e3:.3f} |", flush=True)
        dask_cluster.CHUNK_SECONDS, count = 0.01, arguments.units // 4
        start = time.process_time()
        progress_of(Idle(units=count, seconds=0.02, label="chunks of one"), subject, out, cluster)
        each = (time.process_time() - start) / count
        print(f"| dask, CPU time of the command per chunk of one unit | {each * 1e3:.3f} |", flush=True)


def bytes_(arguments: argparse.Namespace) -> None:
    from landscape.api import configure
    from landscape.running.work import work_of

    with tempfile.TemporaryDirectory() as folder:
        subject = small_subject(folder)
        for name in ("surface", "hessian", "trace"):
            probe, _ = configure(name, {})
            unit = next(iter(probe.plan(subject).units()))
            values = dict.fromkeys(probe.plan(subject).quantities, 1.0)
            sizes = [len(pickle.dumps(thing)) for thing in (work_of(probe, subject), [unit], (1.0, values))]
            print(f"| {name} | {' | '.join(f'{size:,}' for size in sizes)} |", flush=True)


def writer(arguments: argparse.Namespace) -> None:
    import numpy as np

    from landscape.probe import Plan, Quantity
    from landscape.results.run_key import RunKey
    from landscape.results.writer import Writer

    count = 10 * arguments.units
    for numbers in (1, 1000, 100_000):
        units = count if numbers < 10_000 else count // 100
        quantity = Quantity("value", dims=("number",))
        plan = Plan({"unit": np.arange(units)}, {"value": quantity}, {"number": np.arange(numbers)})
        with tempfile.TemporaryDirectory() as folder:
            with Writer(Path(folder, "results.h5"), RunKey("idle", "x", "0" * 10, plan)) as file:
                pending, values = file.pending(), {"value": np.ones(numbers)}
                start = time.perf_counter()
                for unit in pending:
                    file.write(unit, values)
                written = time.perf_counter()
            merged = time.perf_counter()
        print(
            f"| {numbers:,} | {units / (written - start):,.0f} | {(merged - written) / units * 1e6:.0f} |", flush=True
        )


def merge(arguments: argparse.Namespace) -> None:
    from idle_probe import Idle

    from landscape.api import configure
    from landscape.results.merging import merge_files
    from landscape.running.run import reduce_of

    lines = {n: [configure("line", {"resolution": n, "seed": seed})[0] for seed in range(100)] for n in (1023, 5000)}
    idle = [Idle(units=1023, label=f"idle {number}") for number in range(100)]
    for name, probes in (("idle", idle), ("line", lines[5000][:20]), ("line", lines[1023])):
        with tempfile.TemporaryDirectory() as folder:
            files = shards_of(Path(folder), probes)
            merged, start = Path(folder, "merged.h5"), time.process_time()
            found = merge_files(files, merged, reduce_of=reduce_of)
            spent = time.process_time() - start
            assert all(result.done == result.units for result in found)
            start = time.process_time()
            merge_files(files, merged, reduce_of=reduce_of)
            again = time.process_time() - start
        print(f"| {len(probes)} {name} | {found[0].units:,} | {spent:.2f} | {again:.2f} |", flush=True)


def shards_of(folder: Path, probes: list[Any], shards: int = 100) -> list[Path]:
    """Files as the jobs of an array leave them: the same results in each, with the units that it measured."""
    import h5py
    import numpy as np

    from landscape.probe import Shard
    from landscape.results.group import open_or_create
    from landscape.results.updating import change_file
    from landscape.running.run import run_key

    subject, empty = small_subject(str(folder)), folder / "empty.h5"
    keys = [run_key(probe, subject, f"network {number}") for number, probe in enumerate(probes)]
    change_file(empty, lambda file: [open_or_create(file, key) for key in keys] and None)
    files = []
    for number in range(1, shards + 1):
        units = [unit.index for unit in Shard(number, shards).part(keys[0].plan, list(keys[0].plan.units()))]
        files.append(folder / f"part-{number}.h5")
        files[-1].write_bytes(empty.read_bytes())
        with h5py.File(files[-1], "r+") as file:
            for group in file[keys[0].probe].values():
                for name in ("done", *keys[0].plan.quantities):
                    values = group[name][()]
                    values[tuple(np.transpose(units))] = 1
                    group[name][...] = values
    return files


def simulation(arguments: argparse.Namespace) -> None:
    from simulated_workers import Cluster, Simulation

    for unit in (10.0, 1.0, 0.1):
        for workers in WORKERS:
            cluster = Cluster(workers, unit)
            runs = [Simulation(10_000, cluster, seed).run() for seed in range(3)]
            efficiency = statistics.median(run.efficiency(10_000, cluster) for run in runs)
            again = statistics.median(run.measured - 10_000 for run in runs)
            busy, deaths = (
                statistics.median(values) for values in zip(*((r.busy, r.deaths) for r in runs), strict=True)
            )
            print(
                f"| {unit:g} | {workers:,} | {efficiency:.3f} | {again:.0f} | {deaths:.0f} | {busy:.2f} |", flush=True
            )


@dataclass(frozen=True)
class Case:
    """What `speed` measures."""

    probe: str
    parameters: dict[str, Any]
    loading: dict[str, Any]


CASES = (
    Case("surface", {"resolution": "9"}, {"samples": 256, "batch_size": 128}),
    Case("hessian", {"top": 5, "hvp": "traced"}, {"samples": 320, "batch_size": 16}),
)


def speed(arguments: argparse.Namespace) -> None:
    import torch

    import landscape
    from landscape.api import configure
    from landscape.running.executor import IN_PROCESS
    from landscape.running.local_processes import Processes

    for case in CASES:
        probe, _ = configure(case.probe, case.parameters)
        data = {"data": arguments.data, "data_root": arguments.data_root, "split": "train"}
        subject = landscape.load(arguments.checkpoint, **data, **case.loading)
        for _ in range(arguments.repeats):
            torch.set_num_threads(1)
            one, cpu_one = steady(probe, subject, IN_PROCESS, lambda: [os.getpid()])
            torch.set_num_threads(2)
            with Processes(2) as processes:
                two, cpu_two = steady(probe, subject, processes, processes.ready)
            load = os.getloadavg()[0]
            row = f"{one:.3f} | {two:.3f} | {one / two:.2f}x | {cpu_one:.3f} | {cpu_two:.3f}"
            row += f" | {2 * cpu_one / cpu_two:.2f}x"
            print(f"| {case.probe} | {row} | {load:.1f} |", flush=True)


def steady(probe: Any, subject: Any, executor: Any, measuring: Callable[[], list[int]]) -> tuple[float, float]:
    """Wall and CPU seconds per unit once all workers have loaded; `measuring` gives the processes that have."""
    from landscape.running.run import run

    marks: list[tuple[int, float, float]] = []
    seen = 0

    def report(done: int, total: int) -> None:
        nonlocal seen
        seen += len(measuring()) == executor.workers
        if seen > 2 * executor.workers:  # every worker has its set-up behind it
            marks.append((done, time.perf_counter(), sum(map(cpu_seconds, measuring()))))

    run(probe, subject, None, executor=executor, report=report)
    marks = marks[: -executor.workers]  # the last ones leave others idle
    (first, began, used), (last, ended, spent) = marks[0], marks[-1]
    return (ended - began) / (last - first), (spent - used) / (last - first)


def cpu_seconds(process: int) -> float:
    """CPU time of a process, in the system and outside."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


HEADS = {
    "overhead": "executor | ms per unit",
    "dask": "executor | ms per unit",
    "bytes": "probe | work | unit | result",
    "merge": "results in every file | units of each | CPU s | CPU s where the output has them all",
    "writer": "numbers per unit | units per second | microseconds to merge one",
    "simulation": "seconds of a unit | workers | efficiency | measured again | deaths | one process is busy",
    "speed": "probe | one: s / unit | two workers | speed | one: CPU s / unit | two workers | 2 one / two | load",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=[*PARTS, "speed"])
    parser.add_argument("--units", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--data", default="")
    parser.add_argument("--data-root", type=Path)
    arguments = parser.parse_args()
    parts = {
        "overhead": overhead, "dask": dask, "bytes": bytes_, "writer": writer, "merge": merge, "simulation": simulation,
        "speed": speed,
    }  # fmt: skip
    for part in arguments.parts:
        head = HEADS[part]
        print(f"\n### {part}, load {os.getloadavg()[0]:.1f}\n\n| {head} |\n|{' --- |' * (head.count('|') + 1)}")
        parts[part](arguments)


if __name__ == "__main__":
    main()

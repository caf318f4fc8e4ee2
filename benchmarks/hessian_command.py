"""Time the command `landscape hessian` with its defaults against PyHessian and eigsh, each as a process of its own.

    python benchmarks/hessian_command.py --data cifar10 --data-root DATA [--checkpoints DIR] [--batches 64 14]

What is compared is what a user runs: a process that computes the top five eigenvalues of every mini-batch of 16. The
command chooses threads and backend itself; its first run starts with an empty cache of traced graphs, its second run
finds what the first one left. Its seconds contain all preparation of products. PyHessian (its defaults, torch's default
threads) and curvlinops with eigsh, which prepare nothing, run on a part of the mini-batches, spread over the whole;
their time for all is the mean of a mini-batch times their number. `whole process` adds imports and the loading of
weights and images on both sides. Seconds are wall time, and so are speeds unless said. Processes take turns. Errors are
relative to float64, from the first mini-batches; `missed` counts eigenvalues without an estimate within 1 %. A killed
run resumes after the last network that it finished.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measuring import header, parser
from measuring import row as row_of

BATCH_SIZE = 16
Row = dict[str, Any]
PEERS = {"PyHessian": "pyhessian", "curvlinops + eigsh": "curvlinops"}


@dataclass(frozen=True)
class Spent:
    """Seconds of a process."""

    wall: float
    cpu: float


def run(command: list[str], environment: Mapping[str, str]) -> tuple[Spent, str]:
    """Run a process to its end: its wall and CPU seconds, with those of its children, and its standard output."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **environment})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        spent = Spent(time.perf_counter() - start, usage.ru_utime + usage.ru_stime)
        for stream in (output, errors):
            stream.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read()[-2000:]}")
        return spent, output.read()


def command(arguments: argparse.Namespace, checkpoint: Path, batches: int, cache: Path, out: Path) -> list[Spent]:
    """One run with the defaults into a new results file: the whole process, and the measurement alone."""
    from landscape.cli.process_setup import MALLOC

    out.unlink(missing_ok=True)
    own = {
        "LANDSCAPE_CACHE": str(cache),
        "OMP_WAIT_POLICY": "passive",
        **{name: str(value) for name, _, value in MALLOC},
    }
    options = ["--child", "ours", "--results", str(out), *about(arguments, checkpoint, batches * BATCH_SIZE)]
    whole, printed = run([sys.executable, __file__, *options], own)
    return [whole, Spent(*json.loads(printed.splitlines()[-1]))]


def about(arguments: argparse.Namespace, checkpoint: Path, samples: int) -> list[str]:
    """Options that tell a child what to load."""
    options = ["--checkpoint", str(checkpoint), "--samples", str(samples), "--data", arguments.data]
    return [*options, "--data-root", str(arguments.data_root)] if arguments.data_root else options


def measured(out: Path) -> tuple[np.ndarray, float, int]:
    """Eigenvalues (batch, rank), mean products, and the number of the backend, of a results file."""
    import h5py

    with h5py.File(out) as file:
        ((group),) = file["hessian"].values()
        return group["eigenvalue"][:], float(group["matvecs"][:].mean()), int(group["hvp"][0])


def child(arguments: argparse.Namespace) -> None:
    """What a process of ours, of a peer, or of the float64 reference, does; prints a row, or one per mini-batch."""
    import other_engines

    import landscape

    subject = landscape.load(
        arguments.checkpoint, data=arguments.data, data_root=arguments.data_root, split="train", device="cpu",
        samples=arguments.samples, batch_size=BATCH_SIZE,
    )  # fmt: skip
    if arguments.child == "ours":  # as the command does: this process has its settings in the environment
        start, before = time.perf_counter(), os.times()
        landscape.measure("hessian", subject, out=arguments.results)
        spent = sum(os.times()[:4]) - sum(before[:4])
        print(json.dumps([time.perf_counter() - start, spent]))
        return
    if arguments.child == "reference":
        subject.model.double()
    compute = {"pyhessian": other_engines.pyhessian, "curvlinops": other_engines.curvlinops}
    for i in arguments.which:
        start, cpu = time.perf_counter(), time.process_time()
        if arguments.child == "reference":
            values, products = other_engines.reference(subject, i), 0
        else:
            values, products = compute[arguments.child](subject, i)
        spent = [time.perf_counter() - start, time.process_time() - cpu]
        print(json.dumps([i, *spent, products, np.asarray(values, float).tolist()]), flush=True)


def peer(
    arguments: argparse.Namespace, kind: str, checkpoint: Path, samples: int, which: list[int]
) -> tuple[Spent, list[list[Any]]]:
    """Run mini-batches of a peer in a process; returns the seconds spent outside them, and a row each."""
    options = ["--child", kind, *about(arguments, checkpoint, samples), "--which", *map(str, which)]
    one_thread = {"OMP_NUM_THREADS": "1"} if kind == "reference" else {}
    spent, printed = run([sys.executable, __file__, *options], one_thread)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("[")]
    return Spent(spent.wall - sum(r[1] for r in rows), spent.cpu - sum(r[2] for r in rows)), rows


def with_statistics(arguments: argparse.Namespace, folder: Path, samples: int) -> Path:
    """Save the initial weights with batch-norm statistics of the samples as a checkpoint in the run folder."""
    path = folder / "init-with-statistics.pt"
    if not path.exists():
        import torch

        import landscape
        from landscape.subject.batchnorm import refresh

        subject = landscape.load(
            folder / "init.pt", data=arguments.data, data_root=arguments.data_root, split="train", device="cpu",
            samples=samples, batch_size=BATCH_SIZE,
        )  # fmt: skip
        refresh(subject, len(subject.batches))
        stored = torch.load(folder / "init.pt", weights_only=True)
        stored["state_dict"] = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
        torch.save(stored, path)
    return path


def measure(arguments: argparse.Namespace, done: set[tuple[str, str]]) -> Iterator[Row]:
    """All rows, one after the other, but those of the networks (name, state) that are done."""
    most = max(arguments.batches)
    samples = most * BATCH_SIZE
    spread = [int(i) for i in np.linspace(0, most - 1, arguments.peer_batches)]
    for name in arguments.models:
        folder = arguments.checkpoints / f"{name}-{arguments.data}"
        for state in ("trained", "untrained"):
            if (name, state) in done:
                continue
            checkpoint = folder / "final.pt" if state == "trained" else with_statistics(arguments, folder, samples)
            case = {"model": name, "state": state}
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch) / "results.h5"
                for turn, batches in enumerate(arguments.batches):
                    cache = Path(scratch) / f"cache-{turn}"
                    for again in ("first run", "second run"):
                        whole, alone = command(arguments, checkpoint, batches, cache, out)
                        values, products, hvp = measured(out)
                        yield {
                            **case, "engine": "ours", "run": again, "batches": batches, "wall": whole.wall,
                            "cpu": whole.cpu, "measuring": [alone.wall, alone.cpu], "products": products, "hvp": hvp,
                            "values": values.tolist(),
                        }  # fmt: skip
                        part = spread[(2 * turn + (again == "second run")) :: 2 * len(arguments.batches)]
                        for engine, kind in PEERS.items():
                            which = part if kind == "pyhessian" else part[: max(1, len(part) // 2)]
                            beside, rows = peer(arguments, kind, checkpoint, samples, which)
                            yield {**case, "engine": engine, "beside": [beside.wall, beside.cpu], "rows": rows}
            _, rows = peer(arguments, "reference", checkpoint, samples, list(range(arguments.references)))
            yield {**case, "engine": "reference", "rows": rows}


def table(rows: list[Row]) -> str:
    """Seconds of all engines for every number of mini-batches, and ratios."""
    from landscape.products.hvp_backends import CODES

    columns = (
        "model, state, mini-batches, PyHessian s, eigsh s, ours: first run s, second run s, backend, speed: first run, "
        "second run, whole process: first run, second run, by CPU time: first run, second run, "
        "against eigsh: first run, second run, products, worst error, missed, PyHessian: products, worst error, missed"
    )
    lines: list[str] = [header(*columns.split(", "))]
    ratios: dict[tuple[int, str], list[float]] = defaultdict(list)
    cases = list(dict.fromkeys((r["model"], r["state"]) for r in rows))
    for case in cases:
        own = [r for r in rows if (r["model"], r["state"]) == case]
        truth = {r[0]: np.array(r[4]) for one in own if one["engine"] == "reference" for r in one["rows"]}
        peers = {engine: _peer_numbers([r for r in own if r["engine"] == engine], truth) for engine in PEERS}
        for batches in dict.fromkeys(r["batches"] for r in own if r["engine"] == "ours"):
            runs = {r["run"]: r for r in own if r["engine"] == "ours" and r["batches"] == batches}
            alone, cpu, whole = (
                {e: p["beside"][0] * started + batches * p["mean"][k] for e, p in peers.items()}
                for k, started in ((0, 0), (1, 0), (0, 1))
            )
            py, eigsh = (alone[engine] for engine in PEERS)
            speed = {run: py / r["measuring"][0] for run, r in runs.items()}
            for run, value in speed.items():
                ratios[batches, run].append(value)
            values = (
                np.array(runs["second run"]["values"]) if batches == max(r.get("batches", 0) for r in own) else None
            )
            worst, missed, count = _errors({i: v for i, v in enumerate(values)} if values is not None else {}, truth)
            lines.append(row_of(
                *case, batches, f"{py:.0f}", f"{eigsh:.0f}", *(f"{r['measuring'][0]:.1f}" for r in runs.values()),
                CODES[runs["second run"]["hvp"]], *(f"{value:.1f}x" for value in speed.values()),
                *(f"{whole['PyHessian'] / r['wall']:.1f}x" for r in runs.values()),
                *(f"{cpu['PyHessian'] / r['measuring'][1]:.1f}x" for r in runs.values()),
                *(f"{eigsh / r['measuring'][0]:.1f}x" for r in runs.values()),
                f"{runs['second run']['products']:.1f}",
                *((f"{worst:.1e}", f"{missed}/{count}") if count else ("", "")),
                f"{peers['PyHessian']['products']:.0f}", f"{peers['PyHessian']['worst']:.1e}",
                f"{peers['PyHessian']['missed']}/{peers['PyHessian']['count']}",
            ))  # fmt: skip
    means = "; ".join(
        f"{batches} mini-batches, {run}: {statistics.geometric_mean(found):.1f}x"
        for (batches, run), found in ratios.items()
    )
    return "\n".join(lines) + f"\n\nGeometric means of the speeds: {means}"


def _peer_numbers(rows: list[Row], truth: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Seconds beside the mini-batches and per mini-batch (wall, CPU), products and errors of a peer."""
    every = [one for r in rows for one in r["rows"]]
    worst, missed, count = _errors({one[0]: np.array(one[4]) for one in every}, truth)
    return {
        "beside": [statistics.mean(r["beside"][k] for r in rows) for k in (0, 1)],
        "mean": [statistics.mean(one[1 + k] for one in every) for k in (0, 1)],
        "products": statistics.mean(one[3] for one in every),
        "worst": worst, "missed": missed, "count": count,
    }  # fmt: skip


def _errors(values: Mapping[int, np.ndarray], truth: Mapping[int, np.ndarray]) -> tuple[float, int, int]:
    """Worst relative error, missed values and their number, over mini-batches with a reference."""
    from other_engines import errors

    found = [errors(values[i], truth[i]) for i in values.keys() & truth.keys()]
    if not found:
        return math.nan, 0, 0
    return max(f[0] for f in found), sum(f[2] for f in found), len(found) * len(next(iter(truth.values())))


def main() -> None:
    options = parser(__doc__, data="cifar10", checkpoints=Path("checkpoints"))
    options.add_argument("--models", nargs="+", default=["resnet_demo", "preresnet_demo", "vit_demo"])
    options.add_argument("--data-root", type=Path)
    options.add_argument("--batches", type=int, nargs="+", default=[64, 14], help="numbers of mini-batches of 16")
    options.add_argument("--peer-batches", type=int, default=8, help="mini-batches of PyHessian, eigsh half of them")
    options.add_argument("--references", type=int, default=20, help="mini-batches with a float64 reference")
    options.add_argument("--out", type=Path, default=Path("hessian_command.jsonl"))
    options.add_argument("--child", default="", help=argparse.SUPPRESS)
    options.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    options.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--which", type=int, nargs="*", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        child(arguments)
        return
    rows: list[Row] = []
    if arguments.out.exists():
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done = {(r["model"], r["state"]) for r in rows if r["engine"] == "reference"}
    rows = [r for r in rows if (r["model"], r["state"]) in done]
    arguments.out.write_text("".join(json.dumps(r) + "\n" for r in rows))
    for one in measure(arguments, done):
        rows.append(one)
        with arguments.out.open("a") as stream:
            stream.write(json.dumps(one) + "\n")
        if one["engine"] == "reference":
            print(f"{one['model']} {one['state']} measured", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

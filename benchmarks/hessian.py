"""Compare top-5 Hessian eigenvalues of mini-batches in one run: ours, PyHessian, and curvlinops with scipy's eigsh.

    python benchmarks/hessian.py --data cifar10 --data-root DATA [--checkpoints DIR] [--out hessian.jsonl]

Every engine gets the same models, the same mini-batches and one thread. Measured per mini-batch: products, process
time, errors against a float64 reference (ours to 1e-9; scipy's eigsh checks the first mini-batch), eigenvalues
missed at 1 %, and the time of a product in gradients; peak memory in a separate run (--memory). Rows are appended one
by one, so that a killed run resumes where it stopped; the table is printed at the end. Trained models are read from
DIR/<model>-<data>/final.pt, untrained ones from its init.pt, with batch-norm statistics (zeros and ones there)
computed from the mini-batches.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Work, clock_of, header, parser, peak_of, seconds, trained, trained_models
from measuring import row as row_of
from other_engines import TOP, curvlinops, errors, pyhessian
from scipy.sparse.linalg import LinearOperator, eigsh

from landscape.cli.process_setup import keep_freed_memory
from landscape.curvature.lanczos import lanczos
from landscape.data import structure
from landscape.products import hvp_backends, vectors
from landscape.products.hessian_product import hessian_product
from landscape.products.operator import Curvature
from landscape.subject import batchnorm
from landscape.subject.subject import Subject

Row = dict[str, Any]


def ours(subject: Subject, i: int, *, curved: Curvature, tol: float = 1e-4) -> tuple[np.ndarray, int]:
    start = vectors.random_unit(subject.size, i, device=subject.device, dtype=subject.dtype)
    found = lanczos(curved.product(i), start, TOP, tol=tol)
    return found.values, found.products


def reference(subject: Subject, i: int) -> np.ndarray:
    """Converged eigenvalues in double precision; checked by eigsh on the first mini-batch."""
    product = hessian_product(partial(subject.loss, i), list(subject.parameters.values()))
    start = vectors.random_unit(subject.size, 10_000 + i, device=subject.device, dtype=subject.dtype)
    values = lanczos(product, start, TOP, tol=1e-9).values
    if i == 0:
        n = subject.size
        operator = LinearOperator(
            (n, n), matvec=lambda v: product(torch.from_numpy(v).to(subject.device)).cpu().numpy(), dtype=np.float64
        )
        checked = eigsh(operator, TOP, which="LM", tol=1e-9, return_eigenvectors=False)
        np.testing.assert_allclose(np.sort(checked), np.sort(values), rtol=1e-7)
    return values


def load(arguments: argparse.Namespace, name: str, file: str, batch_size: int, batches: int) -> Subject:
    subject = trained(arguments, name, file=file, samples=batch_size * batches, batch_size=batch_size)
    if file == "init.pt":
        batchnorm.refresh(subject, len(subject.batches))
    return subject


def engines(subject: Subject, batches: int) -> dict[str, Engine]:
    """The contestants, prepared."""
    found = {
        "PyHessian": Engine(pyhessian, batches),
        # The tight one takes a thousand products and more where eigenvalues are close: one small mini-batch will do.
        "PyHessian 1e-4": Engine(partial(pyhessian, tol=1e-4, iterations=1000), batches // 20),
        "curvlinops + eigsh": Engine(curvlinops, math.ceil(batches / 4)),
    }
    clock = clock_of(subject.device)
    pyhessian(subject, 0, iterations=1)  # what libraries choose and reserve at their first use
    compiled = partial(curvlinops, compiled=True)
    first, second = (seconds(lambda: compiled(subject, 0), clock) for _ in range(2))
    found["curvlinops, compiled + eigsh"] = Engine(compiled, math.ceil(batches / 4), first - second)
    kinds: tuple[hvp_backends.Hvp, ...] = ("double-backward", "traced")
    for kind in kinds:
        start = clock()
        curved = hvp_backends.curvature(subject, subject.parameters, kind, kinks="double")
        product, vector = curved.product(0), torch.zeros(subject.size, device=subject.device)
        product(vector)
        prepared = clock() - start
        found[f"ours, {kind}"] = Engine(partial(ours, curved=curved), batches, prepared, partial(product, vector))
    return found


@dataclass(frozen=True)
class Engine:
    """One way to the eigenvalues: its function, how many mini-batches it gets, seconds of preparation, a product."""

    run: Callable[[Subject, int], tuple[np.ndarray, int]]
    batches: int
    prepared: float = 0.0
    product: Callable[[], object] | None = None


def measure(arguments: argparse.Namespace) -> list[Row]:
    out: Path = arguments.out
    rows: list[Row] = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(r["model"], r["state"], r["batch_size"], r["batch"], r["engine"]) for r in rows}
    cases = [
        (name, state, file, batch_size, batches)
        for name in arguments.models
        for state, file in (("trained", "final.pt"), ("untrained", "init.pt"))
        for batch_size, batches in ((16, arguments.batches), (128, arguments.large))
        if batches and (batch_size == 16 or state == "trained")
    ]
    for name, state, file, batch_size, batches in cases:
        subject, exact = (load(arguments, name, file, batch_size, batches) for _ in range(2))
        exact.model.double()
        contestants, clock = engines(subject, batches), clock_of(subject.device)
        for i in range(batches):  # all engines on one mini-batch, then the next: whatever slows the machine slows all
            missing = {
                engine: one
                for engine, one in contestants.items()
                if i < one.batches and (name, state, batch_size, i, engine) not in known
            }
            if not missing:
                continue
            truth = reference(exact, i)
            gradient = best(partial(_gradient, subject, 0), clock)
            for engine, one in missing.items():
                start = clock()
                values, products = one.run(subject, i)
                spent = clock() - start
                worst, median, missed = errors(values, truth)
                row: Row = {
                    "model": name, "state": state, "batch_size": batch_size, "batch": i, "engine": engine,
                    "products": products, "seconds": spent, "worst": worst, "median": median, "missed": missed,
                    "prepared": one.prepared, "gradient": gradient,
                    "product": best(one.product, clock) / gradient if one.product else math.nan,
                }  # fmt: skip
                gc.collect()  # PyHessian leaves graphs in cycles
                rows.append(row)
                with out.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
        print(f"{name} {state} B {batch_size}: {batches} mini-batches", flush=True)
    return rows


def best(work: Work, clock: Callable[[], float]) -> float:
    """Time of some work, the best of five."""
    return min(seconds(work, clock) for _ in range(5))


def _gradient(subject: Subject, i: int) -> object:
    inputs, targets = subject.batch(i)
    loss = subject.losses(structure.outputs_of(subject.model, inputs), targets).mean()
    return torch.autograd.grad(loss, list(subject.parameters.values()))


def memory(arguments: argparse.Namespace) -> str:
    """Peak memory of every engine on one mini-batch above the loaded subject, each in a process of its own, in MiB."""
    engines = ["PyHessian", "curvlinops + eigsh", "ours, double-backward", "ours, traced"]
    lines = [header("model", "B", *engines)]
    for name, batch_size in itertools.product(arguments.models, (16, 128)):
        peaks = []
        for engine in engines:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
                peaks.append(alone.submit(_peak, arguments, name, batch_size, engine).result())
        lines.append(row_of(name, batch_size, *(f"{peak:.0f}" for peak in peaks)))
    return "\n".join(lines)


def _peak(arguments: argparse.Namespace, name: str, batch_size: int, engine: str) -> float:
    torch.set_num_threads(1)
    subject = load(arguments, name, "final.pt", batch_size, 1)
    _gradient(subject, 0)  # what the libraries reserve at their first use
    gc.collect()

    def run() -> None:
        if engine == "PyHessian":
            pyhessian(subject, 0)
        elif engine.startswith("curvlinops"):
            curvlinops(subject, 0)
        else:
            kind: hvp_backends.Hvp = "double-backward" if "double-backward" in engine else "traced"
            ours(subject, 0, curved=hvp_backends.curvature(subject, subject.parameters, kind, kinks="double"))

    return peak_of(run, subject.device)


def table(rows: list[Row]) -> str:
    columns = (
        "model, state, B, engine, mini-batches, products, s / mini-batch, speed, against eigsh, against compiled, "
        "product / gradient, worst error, median, missed at 1 %, prepared s"
    )
    lines = [header(*columns.split(", "))]
    cells: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        key = (row["model"], row["state"], row["batch_size"], row["engine"])
        cells.setdefault(key, {})[row["batch"]] = row
    for (*case, engine), found in cells.items():
        peers = ("PyHessian", "curvlinops + eigsh", "curvlinops, compiled + eigsh")
        speeds = [_ratio(cells.get((*case, other), {}), found) for other in peers]
        one, count = next(iter(found.values())), len(found)
        numbers = {key: [r[key] for r in found.values()] for key in one}
        products, spent = (statistics.mean(numbers[key]) for key in ("products", "seconds"))
        product, error = (statistics.median(numbers[key]) for key in ("product", "median"))
        lines.append(row_of(
            *case, engine, count, f"{products:.1f}", f"{spent:.3f}", *(f"{speed:.1f}x" for speed in speeds),
            "" if math.isnan(product) else f"{product:.2f}", f"{max(numbers['worst']):.1e}", f"{error:.1e}",
            f"{sum(numbers['missed'])}/{count * TOP}", f"{one['prepared']:.1f}",
        ))  # fmt: skip
    return "\n".join(lines)


def _ratio(base: dict[int, Row], own: dict[int, Row]) -> float:
    """How many times faster, over the mini-batches that both had."""
    shared = base.keys() & own.keys()
    return sum(base[i]["seconds"] for i in shared) / sum(own[i]["seconds"] for i in shared) if shared else math.nan


def main() -> None:
    options = trained_models(parser(__doc__), "resnet_demo", "preresnet_demo", "vit_demo")
    options.add_argument("--batches", type=int, default=4, help="mini-batches of 16")
    options.add_argument("--large", type=int, default=1, help="mini-batches of 128")
    options.add_argument("--out", type=Path, default=Path("hessian.jsonl"))
    options.add_argument("--memory", action="store_true", help="only the peak memory, a process per engine")
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("landscape").setLevel(logging.DEBUG)
    arguments = options.parse_args()
    if not arguments.memory:  # where it would be counted
        keep_freed_memory()  # as the command does, here for all engines
    print(memory(arguments) if arguments.memory else table(measure(arguments)))


if __name__ == "__main__":
    main()

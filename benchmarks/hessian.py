"""Top-5 Hessian eigenvalues of mini-batches: ours against PyHessian and curvlinops with scipy's eigsh, in one run.

    python benchmarks/hessian.py --data cifar10 --data-root DATA [--checkpoints DIR] [--out hessian.jsonl]

Every engine gets the same models, the same mini-batches and one thread. Measured per mini-batch: products, process
time, errors against a float64 reference (ours at residual 1e-9, of which scipy's eigsh checks the first mini-batch),
eigenvalues missed at 1 %. Rows are appended as they come, so that a killed run goes on where it stopped; the table is
printed at the end. Trained models are read from DIR/<model>-<data>/final.pt, untrained ones from its init.pt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

import landscape
from landscape.curvature import Curvature, curvature
from landscape.linalg.hessian import differentiable_attention, hessian_product
from landscape.linalg.lanczos import lanczos
from landscape.linalg.vector import random_unit
from landscape.subject import Subject, outputs_of

TOP = 5
Row = dict[str, object]


def ours(subject: Subject, i: int, *, curved: Curvature, tol: float = 1e-3) -> tuple[np.ndarray, int]:
    start = random_unit(subject.size, i, device=subject.device, dtype=subject.dtype)
    found = lanczos(curved.product(i), start, TOP, tol=tol, ends=1.0)
    return found.values, found.products


def pyhessian(subject: Subject, i: int, *, tol: float = 1e-3, iterations: int = 100) -> tuple[np.ndarray, int]:
    module = import_module("pyhessian.hessian")  # the package gives its class the module's name

    products = 0
    original = module.hessian_vector_product

    def counted(*arguments: object) -> object:
        nonlocal products
        products += 1
        return original(*arguments)

    module.hessian_vector_product = counted
    try:
        with differentiable_attention(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # create_graph=True with backward()
            criterion = lambda outputs, targets: subject.losses(outputs, targets).mean()  # noqa: E731
            made = module.hessian(subject.model, criterion, data=subject.batch(i), cuda=False)
            torch.manual_seed(i)
            values, _ = made.eigenvalues(maxIter=iterations, tol=tol, top_n=TOP)
    finally:
        module.hessian_vector_product = original
        subject.model.zero_grad(set_to_none=True)  # it leaves gradients with graphs behind
    return np.array(values), products


def curvlinops(subject: Subject, i: int) -> tuple[np.ndarray, int]:
    from curvlinops import HessianLinearOperator

    loss = torch.nn.CrossEntropyLoss()
    parameters = list(subject.parameters.values())
    with differentiable_attention(), contextlib.redirect_stdout(io.StringIO()):
        operator = HessianLinearOperator(
            subject.model, loss, parameters, [subject.batch(i)], progressbar=False, check_deterministic=False
        )
        products = 0
        scipy_operator = operator.to_scipy()

        def matvec(vector: np.ndarray) -> np.ndarray:
            nonlocal products
            products += 1
            return np.asarray(scipy_operator @ vector)

        n = subject.size
        counted = LinearOperator((n, n), matvec=matvec, dtype=np.float32)
        start = np.random.default_rng(i).standard_normal(n).astype(np.float32)
        values = eigsh(counted, TOP, which="LM", tol=1e-3, v0=start, return_eigenvectors=False)
    return values[np.argsort(-np.abs(values))], products


def reference(subject: Subject, i: int) -> np.ndarray:
    product = hessian_product(partial(subject.loss, i), list(subject.parameters.values()))
    start = random_unit(subject.size, 10_000 + i, device=subject.device, dtype=subject.dtype)
    values = lanczos(product, start, TOP, tol=1e-9, ends=1.0, max_steps=200).values
    if i == 0:
        n = subject.size
        operator = LinearOperator((n, n), matvec=lambda v: product(torch.from_numpy(v)).numpy(), dtype=np.float64)
        checked = eigsh(operator, TOP, which="LM", tol=1e-9, return_eigenvectors=False)
        np.testing.assert_allclose(np.sort(checked), np.sort(values), rtol=1e-7)
    return values


def errors(values: np.ndarray, truth: np.ndarray) -> tuple[float, float, int]:
    """Worst and median relative error to the nearest estimate, and how many true values have none within 1 %."""
    relative = np.abs(values[:, None] - truth[None, :]) / np.abs(truth)[None, :]
    nearest = relative.min(axis=0)
    return float(nearest.max()), float(np.median(nearest)), int((nearest > 0.01).sum())


def load(path: Path, data: str, root: Path | None, batch_size: int, batches: int, dtype: torch.dtype) -> Subject:
    subject = landscape.load(
        path,
        data=data,
        data_root=root,
        split="train",
        samples=batch_size * batches,
        batch_size=batch_size,
        device="cpu",
    )
    subject.model.to(dtype)
    return subject


def engines(
    subject: Subject, batches: int, compiled: bool
) -> dict[str, tuple[Callable[..., tuple[np.ndarray, int]], float]]:
    """Engine -> (function, seconds of preparation)."""
    found: dict[str, tuple[Callable[..., tuple[np.ndarray, int]], float]] = {
        "PyHessian": (pyhessian, 0.0),
        "PyHessian 1e-4": (partial(pyhessian, tol=1e-4, iterations=1000), 0.0),
        "curvlinops + eigsh": (curvlinops, 0.0),
        "ours, kept graph": (
            partial(ours, curved=curvature(subject, subject.parameters, "kept", batches=batches)),
            0.0,
        ),
    }
    for kind in ("auto", "compiled") if compiled else ("auto",):
        start = time.process_time()
        curved = curvature(subject, subject.parameters, kind, batches=max(batches, 100))
        curved.product(0)(torch.zeros(subject.size))
        found[f"ours, {kind}"] = (partial(ours, curved=curved), time.process_time() - start)
    return found


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = (
        [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    )
    known = {(r["model"], r["state"], r["batch_size"], r["batch"], r["engine"]) for r in rows}
    for name in arguments.models:
        for state, file in (("trained", "final.pt"), ("untrained", "init.pt")):
            for batch_size, batches in ((16, arguments.batches), (128, arguments.large)):
                if batches == 0 or (batch_size == 128 and state == "untrained"):
                    continue
                path = arguments.checkpoints / f"{name}-{arguments.data}" / file
                exact = load(path, arguments.data, arguments.data_root, batch_size, batches, torch.float64)
                subject = load(path, arguments.data, arguments.data_root, batch_size, batches, torch.float32)
                truth = {i: reference(exact, i) for i in range(batches)}
                del exact
                # Compiling is worth its time for many mini-batches of one shape only.
                for engine, (run, prepared) in engines(
                    subject, batches, batch_size == 16 and arguments.compiled
                ).items():
                    limit = math.ceil(batches / 4) if engine in ("PyHessian 1e-4",) else batches
                    for i in range(limit):
                        key = (name, state, batch_size, i, engine)
                        if key in known:
                            continue
                        start = time.process_time()
                        values, products = run(subject, i)
                        seconds = time.process_time() - start
                        worst, median, missed = errors(values, truth[i])
                        row: Row = dict(zip(("model", "state", "batch_size", "batch", "engine"), key, strict=True))
                        row |= {
                            "products": products,
                            "seconds": seconds,
                            "worst": worst,
                            "median": median,
                            "missed": missed,
                        }
                        row |= {
                            "prepared": prepared,
                            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                        }
                        rows.append(row)
                        with arguments.out.open("a") as stream:
                            stream.write(json.dumps(row) + "\n")
                gradient = _gradient_seconds(subject)
                print(f"{name} {state} B {batch_size}: one gradient {1e3 * gradient:.1f} ms", flush=True)
    return rows


def _gradient_seconds(subject: Subject) -> float:
    inputs, targets = subject.batch(0)
    parameters = list(subject.parameters.values())

    def once() -> float:
        start = time.process_time()
        torch.autograd.grad(subject.losses(outputs_of(subject.model, inputs), targets).mean(), parameters)
        return time.process_time() - start

    return min(once() for _ in range(5))


def table(rows: list[Row]) -> str:
    lines = [
        "| model | state | B | engine | mini-batches | products | s / mini-batch | speed | worst error | median "
        "| missed | prepared s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["state"], row["batch_size"], row["engine"]), []).append(row)
    for (model, state, batch_size, engine), found in cells.items():
        base = {r["batch"]: float(r["seconds"]) for r in cells.get((model, state, batch_size, "PyHessian"), [])}  # type: ignore[arg-type]
        own = {r["batch"]: float(r["seconds"]) for r in found}  # type: ignore[arg-type]
        shared = [b for b in own if b in base]
        speed = sum(base[b] for b in shared) / sum(own[b] for b in shared) if shared else math.nan
        count = len(found)
        lines.append(
            f"| {model} | {state} | {batch_size} | {engine} | {count} "
            f"| {statistics.mean(r['products'] for r in found):.1f} "  # type: ignore[type-var, misc]
            f"| {statistics.mean(own.values()):.3f} | {speed:.1f}x "
            f"| {max(r['worst'] for r in found):.1e} | {statistics.median(r['median'] for r in found):.1e} "  # type: ignore[type-var, misc]
            f"| {sum(r['missed'] for r in found)}/{count * TOP} | {found[0]['prepared']:.1f} |"  # type: ignore[misc]
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet_demo", "preresnet_demo", "vit_demo"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--batches", type=int, default=20, help="mini-batches of 16")
    parser.add_argument("--large", type=int, default=2, help="mini-batches of 128")
    parser.add_argument("--compiled", action="store_true", help="also the compiled graph (about a minute per model)")
    parser.add_argument("--out", type=Path, default=Path("hessian.jsonl"))
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(table(measure(parser.parse_args())))


if __name__ == "__main__":
    main()

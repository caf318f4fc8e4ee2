"""Seconds of a measurement within a training loop: the top Hessian eigenvalue of a small network every 100 steps.

A multilayer perceptron of 4,108 parameters on random data; 256 samples in mini-batches of 64 and in one of 256, with
and without a results file. "products alone" is what as many Hessian products take at 2.5 gradients each. "same
weights": whether the training ends with the same bits as without measurements.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from measuring import parser
from torch import Tensor, nn
from torch.nn import functional as F

import landscape
from landscape.subject.subject import Subject

EVERY = 100


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = (nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4))
    return nn.Sequential(*sizes)


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, :2] > 0).long() @ torch.tensor([1, 2])


def train(rounds: int, batch_size: int, out: Path | None, *, measured: bool) -> tuple[list[float], list[int], bytes]:
    """Seconds and products of each measurement, and the weights after the training."""
    model, (inputs, targets) = network(), samples()
    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    subject = Subject(model, batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seconds, products = [], []
    for _ in range(rounds):
        for _ in range(EVERY):
            rows = torch.randperm(len(inputs))[:64]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        if measured:
            start = time.perf_counter()
            found = landscape.measure("hessian", subject, out=out, top=1, quiet=True)
            seconds.append(time.perf_counter() - start)
            products.append(int(found["matvecs"].sum()))
    return seconds, products, b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def seconds_per_gradient(batch_size: int) -> float:
    model, (inputs, targets) = network().eval(), samples()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        loss = F.cross_entropy(model(inputs[:batch_size]), targets[:batch_size])
        torch.autograd.grad(loss, list(model.parameters()))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    arguments = parser(__doc__, rounds=12, threads=1).parse_args()
    torch.set_num_threads(arguments.threads)
    columns = "mini-batches", "results", "first s", "median s", "last s", "products", "products alone s", "same weights"
    print(*("| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns))), sep="\n")
    for batch_size in (64, 256):
        *_, alone = train(arguments.rounds, batch_size, None, measured=False)
        with tempfile.TemporaryDirectory() as folder:
            for name, out in (("in memory", None), ("in a file", Path(folder) / "results.h5")):
                seconds, products, weights = train(arguments.rounds, batch_size, out, measured=True)
                ideal = 2.5 * statistics.median(products) * seconds_per_gradient(batch_size)
                times = f"{seconds[0]:.2f} | {statistics.median(seconds[1:]):.3f} | {seconds[-1]:.3f}"
                work = f"{statistics.median(products):.0f} | {ideal:.3f} | {'yes' if weights == alone else 'no'}"
                print(f"| {256 // batch_size} of {batch_size} | {name} | {times} | {work} |", flush=True)


if __name__ == "__main__":
    main()

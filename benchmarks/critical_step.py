"""Error and forward passes of the critical learning rate, on random quadratics in single and double precision.

    python benchmarks/critical_step.py [--steps 1000] [--size 50] [--seed 0]

Each step is that of a random preconditioner on w'Hw / 2 from random weights, with eigenvalues over four decades and a
learning rate from 1e-3 to 1e3 of the critical one. The search gets no Hessian: the slope, and losses from forward
passes, whose number is counted here. Beside it, doubling and bisection from the learning rate, to the same width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from measuring import header, parser, row
from torch import Tensor

from landscape.weight_space.critical_step import PASSES, WIDTH, critical_step

WITHIN = 2.0**-4
Change = Callable[[float], float]


def random_step(generator: torch.Generator, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
    """Eigenvalues, weights (in the basis of eigenvectors), update, and the exact critical multiple of the update."""
    eigenvalues = 10 ** (4 * torch.rand(size, generator=generator, dtype=torch.float64) - 2)
    weights = torch.randn(size, generator=generator, dtype=torch.float64)
    preconditioner = 10 ** (2 * torch.rand(size, generator=generator, dtype=torch.float64) - 1)
    update = -preconditioner * eigenvalues * weights
    critical = -2 * float((eigenvalues * weights) @ update) / float((eigenvalues * update) @ update)
    share = 10 ** (6 * float(torch.rand(1, generator=generator)) - 3)
    update = (update * critical * share).to(dtype)
    return eigenvalues.to(dtype), weights.to(dtype), update, 1 / share


def doubling(change: Change, most: int = 100) -> tuple[float, int]:
    """The multiple and the passes, that of the start included, by doubling or halving from 1 and bisection."""
    calls, low, high = 2, 0.0, math.inf
    at, first = 1.0, change(1.0)
    while (not low or math.isinf(high)) and calls < most:
        low, high = (at, high) if first <= 0 else (low, at)
        if low and math.isfinite(high):
            break
        at = 2 * at if first <= 0 else at / 2
        first, calls = change(at), calls + 1
    while high > WIDTH * low * (1 + 1e-9) and calls < most:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if change(middle) <= 0 else (low, middle)
        calls += 1
    return math.sqrt(low * high), calls


def main() -> None:
    arguments = parser(__doc__, steps=1000, size=50, seed=0).parse_args()
    print(
        header(
            "precision", "search", f"within 2^-4 in at most {PASSES} passes", "largest error", "passes: mean", "most"
        )
    )
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(arguments.seed)
        found: dict[str, list[tuple[float, int]]] = {"parabola, then bisection": [], "doubling from the step": []}
        for _ in range(arguments.steps):
            eigenvalues, weights, update, exact = random_step(generator, arguments.size, dtype)
            made = [1]  # the forward pass of the start

            def loss(at: Tensor, eigenvalues: Tensor = eigenvalues) -> float:
                return float((eigenvalues * at * at).sum().double() / 2)

            start = loss(weights)

            def change(c: float, weights: Tensor = weights, update: Tensor = update, start: float = start) -> float:
                made[0] += 1  # noqa: B023  # called at once
                return loss(weights + c * update) - start

            slope = float(((eigenvalues * weights) * update).sum().double())
            one = critical_step(change, slope)
            assert one.passes == made[0]
            found["parabola, then bisection"].append((abs(one.multiple / exact - 1), one.passes))
            multiple, passes = doubling(change)
            found["doubling from the step"].append((abs(multiple / exact - 1), passes))
        for name, pairs in found.items():
            errors, passes_made = np.array(pairs).T
            share = np.mean((errors < WITHIN) & (passes_made <= PASSES))
            print(
                row(
                    str(dtype).removeprefix("torch."), name, f"{share:.1%}", f"{np.nanmax(errors):.1%}",
                    f"{passes_made.mean():.1f}", f"{passes_made.max():.0f}",
                ),
                flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()

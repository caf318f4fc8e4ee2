"""Time single predictions, with the work that they leave to an accelerator, and summarise the seconds they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

WARM_UP = 3  # predictions that are not timed
DRAWS = 1000


def timed(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """What a function returns, and the seconds it took."""
    _wait(device)
    start = time.perf_counter()
    found = run()
    _wait(device)
    return found, time.perf_counter() - start


def facts(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean of the seconds of several predictions by `name`, with the ends of its 95 % bootstrap interval."""
    values = np.array(seconds)
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {name: float(values.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

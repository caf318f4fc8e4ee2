"""How many threads to compute with: all of them, or one where waiting for each other costs more than they bring."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

TRIALS = 3


def settle(work: Callable[[], object]) -> int:
    """Try a piece of the work with all threads and with one, keep the faster; the number of threads kept.

    Small networks, and machines that others use too, are often faster with one: a step of a 0.2 M network beside one
    busy process was up to ten times slower with two threads on two cores. `OMP_NUM_THREADS` is an order: no trial then.
    """
    every = torch.get_num_threads()
    if every == 1 or "OMP_NUM_THREADS" in os.environ:
        return every
    together = _seconds(work)
    torch.set_num_threads(1)
    if _seconds(work) > together:
        torch.set_num_threads(every)
    return torch.get_num_threads()


def _seconds(work: Callable[[], object]) -> float:
    """The mean of a few runs after a warm-up: what is slow now and then is slow."""
    work()
    start = time.perf_counter()
    for _ in range(TRIALS):
        work()
    return (time.perf_counter() - start) / TRIALS

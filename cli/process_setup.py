"""Everything the command line sets for the whole process: memory allocation, OpenMP, threads and worker processes.

Nothing here happens when the library is imported. What the user has set in the environment is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from landscape.subject.subject import Subject

# Environment variable, number for `mallopt`, value: blocks up to the first size come from the heap, and its free end is
# kept up to the second.
MALLOC = (("MALLOC_MMAP_THRESHOLD_", -3, 2**30), ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1))
SMALL = 8_000_000  # samples per mini-batch times parameters, below which threads cost more than they gain
REPEATS = 3  # runs per timing


def set_up_process() -> None:
    """Prepare this process and those it starts; to be called before torch is imported."""
    keep_freed_memory()
    # Idle OpenMP threads spin, for milliseconds by default, and starve each other as soon as anything else runs: a
    # training step on two cores beside two busy processes took 3 s, against 0.1 s with a short spin. On a quiet machine
    # it takes 0.04 s either way.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def keep_freed_memory() -> None:
    """Let glibc on Linux keep freed memory for the next tensors.

    By default it returns large blocks to the system as soon as they are freed, and gets the same pages, zeroed, for the
    next tensor of that size: up to half the time of a forward pass of a convolutional network on a CPU.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(name in os.environ for name, _, _ in MALLOC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number, value in MALLOC:
        os.environ[name] = str(value)  # read by the C library of a process when it starts
        if mallopt is not None:
            mallopt(number, value)


def set_threads(subject: Subject) -> None:
    """Choose the number of threads for a subject: one if it is small, else whatever a forward pass is faster with."""
    import torch

    if subject.samples(0) * subject.size < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # by a fixed rule, not a timing: a resumed run then has the same last bits
        return
    with torch.inference_mode():
        fastest_threads(lambda: subject.loss(0))


def fastest_threads(work: Callable[[], object]) -> int:
    """Time a piece of work with all threads and with one, keep the faster setting and return its number of threads.

    One is often faster for small networks and on busy machines: a training step of a 0.2 M network beside one busy
    process was up to ten times slower with two threads on two cores. If `OMP_NUM_THREADS` is set, nothing is timed.
    """
    import torch

    available = torch.get_num_threads()
    if available == 1 or "OMP_NUM_THREADS" in os.environ:
        return available
    parallel = _seconds(work)
    torch.set_num_threads(1)
    if _seconds(work) > parallel:
        torch.set_num_threads(available)
    return torch.get_num_threads()


def _seconds(work: Callable[[], object]) -> float:
    """Mean over a few runs after a warm-up; not the minimum, because interruptions are part of the cost."""
    work()
    return timeit.timeit(work, number=REPEATS) / REPEATS


def worker_pool(workers: int) -> AbstractContextManager[Executor | None]:
    """Processes that share the threads of this one; None for a single worker, which is this process."""
    if workers == 1:
        return nullcontext()
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    import torch

    threads = max(1, torch.get_num_threads() // workers)
    context = multiprocessing.get_context("spawn")  # a forked child would inherit torch's threads and CUDA's state
    settings = threads, multiprocessing.get_start_method()
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=settings)


def _start_worker(threads: int, start_method: str) -> None:
    """Set the threads of a worker, and let a DataLoader in it start its own workers as in the main process."""
    import multiprocessing

    import torch

    torch.set_num_threads(threads)
    multiprocessing.set_start_method(start_method, force=True)  # spawned ones cannot import a user's file

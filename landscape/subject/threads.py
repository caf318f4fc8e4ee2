"""Choose how many threads torch uses for a network on a CPU, so that a busy machine slows it down in proportion.

Every parallel piece of an operation ends when its last thread has finished, and one that another program has displaced
keeps the others waiting: a Hessian product of a small network has 500 such pieces. One thread waits for nobody.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import nn

from landscape.options import counted
from landscape.subject import restoration, weights_cache
from landscape.subject.subject import Subject

SMALL = 8_000_000  # samples per mini-batch times parameters, below which threads cost more than they gain
REPEATS = 3  # runs per timing
ENOUGH = 0.3  # seconds of runs per timing
LONG = 2.0  # seconds of a single run: its parallel pieces are long, and one thread need not be tried
BUSY = 1.25  # load per CPU from which the machine counts as busy
CGROUPS = Path("/sys/fs/cgroup")

_log = logging.getLogger(__name__)
_noted: set[int] = set()  # threads of the one time that it was said
_limit: ContextVar[int] = ContextVar("_limit", default=0)  # of the block of `suitable_threads`; 0 outside


def thread_limit() -> int:
    """The most threads that a measurement may use: as many as torch, or as CPUs in the quota of a container."""
    return _limit.get() or max(1, min(torch.get_num_threads(), _quota()))


@contextmanager
def intra_op_threads(threads: int) -> Iterator[None]:
    """Let torch use so many threads per operation, in the calling thread, while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def suitable_threads(subject: Subject) -> Iterator[None]:
    """Measure a subject with a suitable number of threads per operation, at most `thread_limit`.

    A small network has one, by a fixed rule, so that a resumed measurement has the same last bits; others have the
    number that makes a forward pass fastest now, and agree to rounding. In a group of processes, whose vectors have to
    agree to the last bit, others have as many as there are.
    """
    limit = thread_limit()
    if subject.device.type != "cpu" or limit == torch.get_num_threads() == 1:
        yield
        return
    token = _limit.set(limit)
    try:
        with intra_op_threads(1):
            small = is_small(subject.samples(0), _parameters(subject.model))
            threads = 1 if small else limit if subject.processes.size > 1 else _fastest_forward(subject, limit)
        note_load(threads)
        with intra_op_threads(threads):
            yield
    finally:
        _limit.reset(token)


@contextmanager
def fixed_threads(samples: int, network: nn.Module) -> Iterator[None]:
    """Train a network with one thread if it is small, else with all: a rule, so that equal runs give equal bits."""
    if next(network.parameters()).device.type != "cpu":
        yield
        return
    threads = 1 if is_small(samples, _parameters(network)) else thread_limit()
    note_load(threads)
    with intra_op_threads(threads):
        yield


def is_small(samples: int, parameters: int) -> bool:
    """Whether threads cost more than they gain on mini-batches of so many samples."""
    return samples * parameters < SMALL


def _parameters(network: nn.Module) -> int:
    """Their number, frozen ones included: a forward pass computes with all of them."""
    return sum(p.numel() for p in network.parameters())


def fastest_threads(work: Callable[[], object], limit: int) -> int:
    """The number of threads that finishes a piece of work first by the clock, at most `limit`."""
    unused = round((os.cpu_count() or 1) - _load())
    seconds: dict[int, float] = {}
    for threads in sorted({limit, min(max(unused, 1), limit), 1}, reverse=True):
        with intra_op_threads(threads):
            seconds[threads] = _seconds(work)
        if seconds[threads] > LONG:
            break
    return min(seconds, key=seconds.__getitem__)


def note_load(threads: int) -> None:
    """Log once per process that other programs want more CPUs than there are."""
    load, cpus = _load(), os.cpu_count() or 1
    if load > BUSY * cpus and not _noted:
        _noted.add(threads)
        _log.debug("load %.1f on %d CPUs; %s per operation", load, cpus, counted(threads, "thread"))


def _load() -> float:
    """Processes that run or wait for a CPU, mean of the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


@weights_cache.once_per_weights
def _fastest_forward(subject: Subject, limit: int) -> int:
    with subject.evaluating():
        try:
            return fastest_threads(lambda: subject.loss(0), limit)
        except Exception:  # a probe of layers needs no loss, which outputs without a classifier may not have
            with restoration.evaluation_mode(subject.model):
                return fastest_threads(lambda: subject.outputs(subject.batch(0)[0]), limit)


def _seconds(work: Callable[[], object]) -> float:
    """Mean over a few runs after a warm-up; not the minimum, because interruptions are part of the cost."""
    start = time.perf_counter()
    work()
    warm = time.perf_counter()
    if warm - start > ENOUGH:
        return warm - start
    runs = 0
    while runs < REPEATS and time.perf_counter() - warm < ENOUGH:
        work()
        runs += 1
    return (time.perf_counter() - warm) / runs


@functools.cache
def _quota() -> int:
    """Whole CPUs in the quota of a container (cgroups, both versions); all CPUs where there is none."""
    for text in ("cpu.max", "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us"):
        try:
            quota, period = " ".join((CGROUPS / name).read_text() for name in text.split()).split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal() and period.isdecimal():  # "max" and -1 are no quota
            return max(1, int(quota) // int(period))
    return os.cpu_count() or 1

"""Measure several mini-batches at once on a CPU, each in a thread of its own with one thread per operation.

Small operations gain nothing from several threads, and all threads wait for the slowest at each of them. Mini-batches
are independent: their threads never wait for each other, and the numbers are those of one after the other, bit for bit.
Forward passes take turns (`differentiable_attention` admits one), so that a model may keep tensors of a pass; products
through the graphs run at the same time.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from landscape.data import memory
from landscape.data.dataset import Batches, BatchList
from landscape.products.memory_forecast import forecast
from landscape.subject.subject import Subject
from landscape.subject.threads import intra_op_threads, is_small, thread_limit
from landscape.subject.weights_cache import once_per_weights

G = TypeVar("G")
T = TypeVar("T")
SHARE = 0.5  # of the available memory
LARGEST_BASIS = 2**31  # bytes of the vectors of one search, see `spectrum.BASIS_BYTES`

_log = logging.getLogger(__name__)
_stopped: ContextVar[threading.Event | None] = ContextVar("_stopped", default=None)


class Stopped(Exception):
    """The measurement that this thread works for has ended."""


def proceed() -> None:
    """Leave the thread if its measurement was interrupted; called before every product."""
    event = _stopped.get()
    if event is not None and event.is_set():
        raise Stopped


@contextlib.contextmanager
def mini_batches_at_once(subject: Subject, count: int, *, vectors: int) -> Iterator[int]:
    """How many of `count` mini-batches to measure at once: as many as threads and memory allow, or one.

    With several, torch has one thread per operation in the block, where their products must be prepared. `vectors` of
    the length of the weights are stored for each of them. One at a time are those on an accelerator, in batches that
    are made when they are asked for, of models that differentiate in their forward pass, of a group of processes,
    which make every product together, and a few of a large network.
    """
    limit = min(thread_limit(), count)
    few = limit < thread_limit() and not is_small(subject.samples(0), subject.size)
    if limit < 2 or few or subject.processes.size > 1 or not _separable(subject):
        yield 1
        return
    limit = max(1, min(limit, int(SHARE * memory.available() / _memory(subject, vectors))))
    with intra_op_threads(1) if limit > 1 else contextlib.nullcontext():
        yield limit


def side_by_side(
    groups: Sequence[G], measure: Callable[[G], Iterable[T]], at_once: int, *, crowded: Callable[[], bool]
) -> Iterator[T]:
    """What `measure` yields for each group, in the order of the groups, `at_once` of them at the same time.

    An error appears in its place. Where the generator is closed, threads end before their next product. While memory
    is `crowded`, groups start one at a time.
    """
    if at_once < 2:
        for group in groups:
            yield from measure(group)
        return
    stop, alone = threading.Event(), threading.Lock()
    finished: list[SimpleQueue[Any]] = [SimpleQueue() for _ in groups]

    def work(group: G, found: SimpleQueue[Any]) -> None:
        _stopped.set(stop)
        try:
            with alone if crowded() else contextlib.nullcontext():
                proceed()
                for values in measure(group):
                    found.put((values,))
            found.put(None)
        except BaseException as error:  # raised where the group is due
            found.put(error)

    pool = ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for group, found in zip(groups, finished, strict=True):
            pool.submit(copy_context().run, work, group, found)
        for found in finished:
            while (item := found.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item[0]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@once_per_weights
def announce(subject: Subject, at_once: int) -> None:
    """Log, once for each network, that mini-batches are measured side by side."""
    if at_once > 1:
        _log.debug("%d mini-batches at once, one thread each", at_once)


def _separable(subject: Subject) -> bool:
    """Whether threads share nothing but tensors that they read: modes of torch belong to the calling thread alone."""
    modes = (getattr(torch._C, f"_len_torch_{kind}_stack", int)() for kind in ("function", "dispatch"))
    in_memory = isinstance(subject.batches, Batches | BatchList)
    return subject.device.type == "cpu" and in_memory and not subject.traits.needs_graph and not any(modes)


def _memory(subject: Subject, vectors: int) -> int:
    """Bytes that the products of one mini-batch need, an upper estimate."""
    stored = min(vectors * subject.size * subject.dtype.itemsize, LARGEST_BASIS)
    return forecast(subject, subject.parameters, stored).total(1)

"""Split a mini-batch into micro-batches where its products exceed memory; or measure several at once on a CPU.

The mean over micro-batches is exact. Of mini-batches at once, each has a thread of its own with one thread per
operation: small operations gain nothing from several threads, and all threads wait for the slowest at each of them.
Mini-batches are independent: their threads never wait for each other, and the numbers are those of one after the other,
bit for bit. Forward passes take turns (`differentiable_attention` admits one), so that a model may keep tensors of a
pass; products through the graphs run at the same time.
"""

import contextlib
import gc
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from landscape.data import dataset, memory
from landscape.probe import report_micro_batches, report_products
from landscape.products import hessian_product, memory_forecast
from landscape.subject import graph_replay, threads, weights_cache
from landscape.subject.subject import Subject

T = TypeVar("T")
G = TypeVar("G")
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
    limit = min(threads.thread_limit(), count)
    few = limit < threads.thread_limit() and not threads.is_small(subject.samples(0), subject.size)
    if limit < 2 or few or subject.processes.size > 1 or not _separable(subject):
        yield 1
        return
    limit = max(1, min(limit, int(SHARE * memory.available() / _memory(subject, vectors))))
    with threads.intra_op_threads(1) if limit > 1 else contextlib.nullcontext():
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


@weights_cache.once_per_weights
def announce(subject: Subject, at_once: int) -> None:
    """Log, once for each network, that mini-batches are measured side by side."""
    if at_once > 1:
        _log.debug("%d mini-batches at once, one thread each", at_once)


def _separable(subject: Subject) -> bool:
    """Whether threads share nothing but tensors that they read: modes of torch belong to the calling thread alone."""
    modes = (getattr(torch._C, f"_len_torch_{kind}_stack", int)() for kind in ("function", "dispatch"))
    in_memory = isinstance(subject.batches, dataset.Batches | dataset.BatchList)
    return subject.device.type == "cpu" and in_memory and not subject.traits.needs_graph and not any(modes)


def _memory(subject: Subject, vectors: int) -> int:
    """Bytes that the products of one mini-batch need, an upper estimate."""
    stored = min(vectors * subject.size * subject.dtype.itemsize, LARGEST_BASIS)
    return memory_forecast.forecast(subject, subject.parameters, stored).total(1)


class SampleTooLargeError(MemoryError):
    """Not even one sample fits into memory."""


@dataclass
class MicroBatching:
    """Micro-batches per mini-batch; doubled when memory runs out, and kept for the mini-batches that follow."""

    count: int = 1
    lock: Lock = field(default_factory=Lock, repr=False)  # several mini-batches may run out of memory at once

    def slices(self, samples: int) -> list[slice]:
        size = -(-samples // self.count)
        return [slice(at, min(at + size, samples)) for at in range(0, samples, size)]

    def each(self, samples: int, work: Callable[[slice], T]) -> list[T]:
        """What work gives for every micro-batch of a mini-batch, with smaller ones where it runs out of memory.

        A mini-batch in one part is `slice(None)`: one that cannot be split, which counts as 1 sample, has no rows.

        Raises:
            SampleTooLargeError: a single sample does not fit.
        """
        while True:
            count, slices = self.count, self.slices(samples)
            if len(slices) > 1:
                report_micro_batches(len(slices))
            try:
                return [work(part) for part in slices] if len(slices) > 1 else [work(slice(None))]
            except (RuntimeError, MemoryError) as error:
                if not hessian_product.out_of_memory(error):
                    raise
            self.increase(count, samples)

    def increase(self, count: int, samples: int) -> None:
        """Double the number of micro-batches, with which a mini-batch ran out of memory, and give back what it held.

        Raises:
            SampleTooLargeError: a single sample does not fit.
        """
        with self.lock:
            if self.count <= count:  # else another mini-batch has split them meanwhile
                if self.count >= samples:
                    raise SampleTooLargeError(
                        "a single sample does not fit into memory (or the mini-batch cannot be split); use a smaller "
                        "model, smaller mini-batches, fewer parameters (--params), or another device"
                    )
                self.count = min(2 * self.count, samples)
                _log.warning(
                    "out of memory: continuing with mini-batches of %d in %d micro-batches", samples, self.count
                )
        free_memory()


class MicroBatchedProduct:
    """v -> H v of a mean over samples, with as few micro-batches as memory allows.

    The graph of a whole mini-batch is kept between products. With several micro-batches each graph is rebuilt for every
    product: one more gradient, for the memory of a micro-batch. Samples must not depend on each other, as they do in
    batch norm's training mode.

    `prepare` makes the product of a slice of the samples, `whole` that of all of them if it is another one; `explain`
    adds the cause to an error about a missing second derivative. All mini-batches share one `micro_batching`.

    Raises:
        ValueError: the one that `explain` returns.
        SampleTooLargeError: a single sample does not fit.
    """

    def __init__(
        self,
        prepare: Callable[[slice], hessian_product.Product],
        samples: int,
        micro_batching: MicroBatching,
        *,
        explain: Callable[[ValueError], ValueError],
        whole: Callable[[], hessian_product.Product] | None = None,
    ) -> None:
        self._prepare, self._samples, self._micro_batching, self._explain = prepare, samples, micro_batching, explain
        self._whole: hessian_product.Product | None = None
        if micro_batching.count == 1:
            self._whole = self._within_memory(whole or (lambda: prepare(slice(None))), 1)
        self._loss: Tensor | float = self._mean_value() if self._whole is None else self._whole.loss

    @property
    def value(self) -> float:
        """Value of the function, as `Product.value`."""
        return float(self._loss)

    @property
    def nbytes(self) -> float:
        """As `Product.nbytes`; infinite where graphs of parts of the mini-batch are rebuilt for every product."""
        return math.inf if self._whole is None else self._whole.nbytes

    def gradient(self) -> Tensor:
        """The gradient of the function without weight decay, (n,); see `Curvature.gradient`."""
        whole = self._whole
        return self._retried(lambda: _gradient_of(whole) if whole is not None else self._gradient_by_micro_batches())

    def __call__(self, vector: Tensor) -> Tensor:
        """H v, (n,)."""
        proceed()
        product = self._retried(lambda: (self._whole or self._by_micro_batches)(vector))
        report_products(1)
        return product

    def _retried(self, work: Callable[[], T]) -> T:
        while (result := self._within_memory(work, 1 if self._whole else self._micro_batching.count)) is None:
            self._whole = None
        return result

    def _within_memory(self, work: Callable[[], T], count: int) -> T | None:
        """The result of work in `count` micro-batches; None if it ran out of memory, with more at the next attempt."""
        try:
            return work()
        except ValueError as error:
            raise self._explain(error) from error
        except (RuntimeError, MemoryError) as error:
            if not hessian_product.out_of_memory(error):
                raise
        self._micro_batching.increase(count, self._samples)
        return None

    def _slices(self) -> list[slice]:
        return self._micro_batching.slices(self._samples)

    def _by_micro_batches(self, vector: Tensor) -> Tensor:
        report_micro_batches(self._micro_batching.count)
        total = torch.zeros_like(vector)
        for part in self._slices():
            self._prepare(part).add_to(total, vector, (part.stop - part.start) / self._samples)
        return total

    def _gradient_by_micro_batches(self) -> Tensor:
        return torch.stack(
            [_gradient_of(self._prepare(p)) * ((p.stop - p.start) / self._samples) for p in self._slices()]
        ).sum(dim=0)

    def _mean_value(self) -> float:
        total = self._retried(lambda: sum(self._prepare(p).value * (p.stop - p.start) for p in self._slices()))
        return float(total) / self._samples


def _gradient_of(product: hessian_product.Product) -> Tensor:
    assert isinstance(product, hessian_product.HessianProduct)
    return product.gradient


def free_memory() -> None:
    """Give back what a computation held that ran out of memory."""
    gc.collect()
    graph_replay.empty_cache()

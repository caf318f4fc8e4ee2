"""Split a mini-batch into micro-batches where its products exceed memory; their mean is exact."""

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from landscape.probe import report_micro_batches, report_products
from landscape.products.hessian_product import HessianProduct, Product, out_of_memory
from landscape.products.side_by_side import proceed
from landscape.subject.graph_replay import empty_cache

T = TypeVar("T")
log = logging.getLogger(__name__)


class SampleTooLargeError(MemoryError):
    """Not even one sample fits into memory."""


@dataclass
class MicroBatching:
    """Micro-batches per mini-batch; doubled when memory runs out, and kept for the mini-batches that follow."""

    count: int = 1
    lock: Lock = field(default_factory=Lock, repr=False)  # several mini-batches may run out of memory at once

    def slices(self, samples: int) -> list[slice]:
        """The micro-batches of a mini-batch."""
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
                if not out_of_memory(error):
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
                log.warning(
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
        prepare: Callable[[slice], Product],
        samples: int,
        micro_batching: MicroBatching,
        *,
        explain: Callable[[ValueError], ValueError],
        whole: Callable[[], Product] | None = None,
    ) -> None:
        self._prepare, self._samples, self._micro_batching, self._explain = prepare, samples, micro_batching, explain
        self._whole: Product | None = None
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
        """The gradient of the function without weight decay, (n,); of products by double backward alone."""
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
            if not out_of_memory(error):
                raise
        self._micro_batching.increase(count, self._samples)
        return None

    def _slices(self) -> list[slice]:
        return self._micro_batching.slices(self._samples)

    def _by_micro_batches(self, vector: Tensor) -> Tensor:
        report_micro_batches(self._micro_batching.count)
        total = torch.zeros_like(vector)
        for part in self._slices():
            total.add_(self._prepare(part)(vector), alpha=(part.stop - part.start) / self._samples)
        return total

    def _gradient_by_micro_batches(self) -> Tensor:
        return torch.stack(
            [_gradient_of(self._prepare(p)) * ((p.stop - p.start) / self._samples) for p in self._slices()]
        ).sum(dim=0)

    def _mean_value(self) -> float:
        total = self._retried(lambda: sum(self._prepare(p).value * (p.stop - p.start) for p in self._slices()))
        return float(total) / self._samples


def _gradient_of(product: Product) -> Tensor:
    assert isinstance(product, HessianProduct)
    return product.gradient


def free_memory() -> None:
    """Give back what a computation held that ran out of memory."""
    gc.collect()
    empty_cache()

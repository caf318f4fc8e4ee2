"""Products on a mini-batch that may not fit into memory: it is then cut into parts, whose weighted mean is exact."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from landscape.curvature.hessian_product import out_of_memory

T = TypeVar("T")
log = logging.getLogger(__name__)


class Product(Protocol):
    """v -> H v for a function whose value is known."""

    @property
    def value(self) -> float: ...

    def __call__(self, vector: Tensor, /) -> Tensor: ...


@dataclass
class Cut:
    """Into how many parts mini-batches are cut; doubled where memory runs out, and kept for those that follow."""

    parts: int = 1


class Divided:
    """v -> H v of a mean over samples, from as few parts as memory allows.

    The graph of a whole mini-batch is kept. Of parts each is rebuilt for every product: one more gradient, for the
    memory of a part. Samples must not depend on each other, as they do in batch norm's training mode.

    Args:
        make: prepares the product of some samples.
        samples: in the mini-batch.
        cut: into how many parts, shared by all mini-batches.
        explain: makes more of an error that says that there is no second derivative.
        whole: prepares that of all of them where it is another one than `make` gives.

    Raises:
        ValueError: as explained.
        MemoryError: a single sample does not fit.
    """

    def __init__(
        self,
        make: Callable[[slice], Product],
        samples: int,
        cut: Cut,
        *,
        explain: Callable[[ValueError], ValueError],
        whole: Callable[[], Product] | None = None,
    ) -> None:
        self._make, self._samples, self._cut, self._explain = make, samples, cut, explain
        self._kept: Product | None = None
        if cut.parts == 1:
            self._kept = self._within_memory(whole or (lambda: make(slice(None))))
        self.value = self._mean_value() if self._kept is None else self._kept.value

    def __call__(self, vector: Tensor) -> Tensor:
        """H v, (n,)."""
        found = None
        while found is None:
            found = self._within_memory(lambda: (self._kept or self._in_parts)(vector))
            if found is None:
                self._kept = None
        return found

    def _within_memory(self, work: Callable[[], T]) -> T | None:
        """What the work gives, or None after it ran out of memory, with more parts for the next attempt."""
        try:
            return work()
        except ValueError as error:
            raise self._explain(error) from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        if self._cut.parts >= self._samples:
            raise MemoryError(
                "the curvature of a single sample does not fit into memory; ask for a smaller model, "
                "fewer parameters with --params, or another device"
            )
        self._cut.parts = min(2 * self._cut.parts, self._samples)
        log.warning("out of memory: mini-batches of %d go on in %d parts", self._samples, self._cut.parts)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _parts(self) -> list[slice]:
        size = -(-self._samples // self._cut.parts)
        return [slice(at, min(at + size, self._samples)) for at in range(0, self._samples, size)]

    def _in_parts(self, vector: Tensor) -> Tensor:
        total = torch.zeros_like(vector)
        for part in self._parts():
            total.add_(self._make(part)(vector), alpha=(part.stop - part.start) / self._samples)
        return total

    def _mean_value(self) -> float:
        found = None
        while found is None:
            found = self._within_memory(
                lambda: sum(self._make(part).value * (part.stop - part.start) for part in self._parts())
            )
        return float(found) / self._samples

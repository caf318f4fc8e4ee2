"""Curvature and loss of the mean over many samples, which the processes of a group share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from landscape.products.micro_batches import MicroBatchedProduct
from landscape.products.operator import WHOLE, Curvature, cache_of_all, part_of
from landscape.subject.restoration import evaluation_mode
from landscape.subject.subject import Subject


def over_all_samples(
    subject: Subject, curvature: Curvature, *, batches: int | None = None
) -> Callable[[Tensor], Tensor]:
    """`over_mini_batches` of the first `batches`, or all: the mean over the samples."""
    return over_mini_batches(subject, curvature, range(len(subject.batches))[:batches])


def over_mini_batches(subject: Subject, curvature: Curvature, batches: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Products v -> H v for the mean over all samples of mini-batches, which weigh by their size; weight decay once.

    The graph of a single mini-batch is kept. Those of several are rebuilt for every product: one more gradient, for
    the memory of one mini-batch. Activation patterns that are fixed are computed once and kept for all of them, in
    compact form.

    The processes of the subject's group share the samples, and add their parts of a product by one all-reduce; all of
    them have to make the same products, of vectors that are equal to the last bit.
    """
    processes = subject.processes
    shares = shares_of(subject, batches)
    if processes.size == 1 and len(shares) == 1:
        return curvature.product(batches[0], WHOLE)
    if curvature.fixed and curvature.patterns is None and shares:
        first = curvature.pattern(shares[0].batch, shares[0].part)
        curvature = replace(curvature, patterns=cache_of_all(subject, first, len(shares)))
    add = _Sum(curvature, shares)

    def product(vector: Tensor) -> Tensor:
        if processes.size > 1:
            return processes.summed(partial(add, vector), vector)
        total = torch.zeros_like(vector)
        add(vector, total)
        return total

    return product


@dataclass(frozen=True)
class Share:
    """Samples of a mini-batch that this process takes."""

    batch: int
    part: slice  # `WHOLE` for all
    weight: float  # their share of all samples


def shares_of(subject: Subject, batches: Sequence[int]) -> list[Share]:
    """The samples of mini-batches that this process takes: equal numbers of consecutive ones, perhaps none.

    Where samples cannot be separated, a mini-batch belongs to the process that its first sample falls to.
    """
    sizes, processes = [subject.samples(i) for i in batches], subject.processes
    total, divisible = sum(sizes), processes.size == 1 or subject.divisible
    first, last = (total * (processes.rank + i) // processes.size for i in (0, 1))
    shares, at = [], 0
    for batch, size in zip(batches, sizes, strict=True):
        start, stop = max(first - at, 0), min(last - at, size)
        if not divisible:
            start, stop = (0, size) if first <= at < last else (0, 0)
        if start < stop:
            part = WHOLE if (start, stop) == (0, size) else slice(start, stop)
            shares.append(Share(batch, part, (stop - start) / total))
        at += size
    return shares


class _Sum:
    """Adds the products of some samples with a vector, weighted, to a tensor; the graph of a single share is kept."""

    def __init__(self, curvature: Curvature, shares: Sequence[Share]) -> None:
        self._curvature, self._shares = curvature, shares
        self._kept: MicroBatchedProduct | None = None

    def __call__(self, vector: Tensor, total: Tensor) -> None:
        step = max(self._curvature.batched, 1)
        for at in range(0, len(self._shares), step):
            group = self._shares[at : at + step]
            indices = [share.batch for share in group]
            if all(share.part == WHOLE for share in group) and self._curvature.fits_batched(indices):
                weights = torch.tensor([share.weight for share in group], dtype=vector.dtype, device=vector.device)
                total += weights @ self._curvature.batched_product(indices)(vector.expand(len(group), -1))
                continue
            for share in group:
                total.add_(self._product(share)(vector), alpha=share.weight)

    def _product(self, share: Share) -> MicroBatchedProduct:
        if len(self._shares) > 1:
            return self._curvature.product(share.batch, share.part)
        self._kept = self._kept or self._curvature.product(share.batch, share.part)
        return self._kept


def mean_loss(subject: Subject, batches: Sequence[int]) -> float:
    """The mean loss over all samples of mini-batches, which the processes of the subject's group share."""
    shares = shares_of(subject, batches)
    if subject.processes.size == 1:
        sizes = np.array([subject.samples(i) for i in batches])
        with torch.no_grad():
            losses = torch.stack([subject.loss(i) for i in batches]).double().cpu().numpy()
        return float(sizes @ losses / sizes.sum())

    def add(total: Tensor) -> None:
        for share in shares:
            with torch.no_grad(), evaluation_mode(subject.model):
                inputs, targets = part_of(subject, share.batch, share.part)
                total += share.weight * subject.losses(subject.outputs(inputs), targets).double().mean()

    zero = torch.zeros(1, dtype=torch.float64, device=subject.device)
    return float(subject.processes.summed(add, zero))

"""Curvature and loss of means over many samples, which the processes of a group share, and over groups of samples."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from landscape.probe import derived_seed
from landscape.products.kinks import cache_of_all
from landscape.products.memory_forecast import forecast, room_for_graphs
from landscape.products.micro_batches import MicroBatchedProduct
from landscape.products.operator import WHOLE, Curvature, part_of
from landscape.products.vectors import flat
from landscape.subject import other_samples, restoration
from landscape.subject.losses import loss_gradients
from landscape.subject.subject import Subject, more_samples


def over_mini_batches(curvature: Curvature, batches: Sequence[int] | None = None) -> Callable[[Tensor], Tensor]:
    """Products v -> H v for the mean over all samples of mini-batches, or of all; weight decay once.

    Graphs of mini-batches are kept while a quarter of the free memory holds them; the others are rebuilt for every
    product: one more gradient, for the memory of one mini-batch. Activation patterns that are fixed are computed once
    and kept for all of them, in compact form.

    The processes of the subject's group share the samples, and add their parts of a product by one all-reduce; all of
    them have to make the same products, of vectors that are equal to the last bit.
    """
    subject, processes = curvature.subject, curvature.subject.processes
    shares = shares_of(subject, range(len(subject.batches)) if batches is None else batches)
    if processes.size == 1 and len(shares) == 1:
        return curvature.product(shares[0].batch, shares[0].part)
    if curvature.fixed and curvature.patterns is None and shares:
        first = curvature.pattern(shares[0].batch, shares[0].part)
        curvature = replace(curvature, patterns=cache_of_all(first, len(shares), subject.device))
    add = _Sum(curvature, shares)

    def product(vector: Tensor) -> Tensor:
        if processes.size > 1:
            return processes.summed(partial(add, vector), vector)
        total = torch.zeros_like(vector)
        add(vector, total)
        return total

    return product


def whole_batches(subject: Subject) -> int:
    """How many mini-batches are measured one by one: all, without a last smaller one beside others.

    That one has another spectrum and another noise. Mini-batches that a loader formed may have any sizes.
    """
    count = len(subject.batches)
    return count - (count > 1 and subject.samples(count - 1) < subject.samples(0))


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
    return _consecutive(batches, sizes, first, last, total, divisible=divisible)


def _consecutive(
    batches: Sequence[int], sizes: Sequence[int], first: int, last: int, total: int, *, divisible: bool = True
) -> list[Share]:
    """Samples from the position `first` up to `last` in the mini-batches, which weigh as shares of `total`."""
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
    """Adds the products of some samples with a vector, weighted, to a tensor; graphs are kept where there is room."""

    def __init__(self, curvature: Curvature, shares: Sequence[Share]) -> None:
        self._curvature, self._shares = curvature, shares
        self._kept: dict[int, MicroBatchedProduct] = {}  # by the position of their share
        self._room = 0.0  # bytes, for others than the first one
        self._weights: Tensor | None = None  # of the shares, on the device: made once, because copying them waits

    def __call__(self, vector: Tensor, total: Tensor) -> None:
        step = max(self._curvature.batched, 1)
        for at in range(0, len(self._shares), step):
            group = self._shares[at : at + step]
            indices = [share.batch for share in group]
            if all(share.part == WHOLE for share in group) and self._curvature.fits_batched(indices):
                if self._weights is None:
                    self._weights = vector.new_tensor([share.weight for share in self._shares])
                total += self._weights[at : at + step] @ self._curvature.batched_product(indices)(
                    vector.expand(len(group), -1)
                )
                continue
            for position, share in enumerate(group, at):
                total.add_(self._product(position, share)(vector), alpha=share.weight)

    def _product(self, position: int, share: Share) -> MicroBatchedProduct:
        if position in self._kept:
            return self._kept[position]
        product, subject = self._curvature.product(share.batch, share.part), self._curvature.subject
        if not self._kept:  # what the first one takes is taken already
            self._kept[position], self._room = product, room_for_graphs(subject.device)
        elif self._room:
            needed = product.nbytes or forecast(subject, self._curvature.parameters, 0).graph or math.inf
            if needed <= self._room:
                self._kept[position], self._room = product, self._room - needed
        return product


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
            with torch.no_grad(), restoration.evaluation_mode(subject.model):
                inputs, targets = part_of(subject, share.batch, share.part)
                total += share.weight * subject.losses(subject.outputs(inputs), targets).double().mean()

    zero = torch.zeros(1, dtype=torch.float64, device=subject.device)
    return float(subject.processes.summed(add, zero))


QUARTERS = 4


@dataclass(frozen=True)
class Quarter:
    """Samples whose mean gradient is one observation: parts of mini-batches, weighted by their number of samples."""

    shares: tuple[Share, ...]
    samples: int


@dataclass(frozen=True)
class SampleGroups:
    """Equally large groups of a subject's samples, each divided into four quarters."""

    subject: Subject  # with the samples in the order in which they are divided
    groups: tuple[tuple[Quarter, ...], ...]


def quarter_size(subject: Subject, count: int) -> int:
    """Samples in a quarter of each of `count` groups; mini-batches where samples cannot be separated.

    Raises:
        ValueError: there are too few.
    """
    found, what = (len(subject), "samples") if subject.divisible else (len(subject.batches), "mini-batches")
    if found < QUARTERS * count:
        raise ValueError(
            f"--groups {count} needs {QUARTERS * count} {what}, four per group, got {found}; "
            + more_samples(
                subject,
                *([] if subject.divisible or subject.images is None else ["lower --batch-size"]),
                *([f"give at most --groups {found // QUARTERS}"] if found >= 3 * QUARTERS else []),
            )
        )
    return found // (QUARTERS * count)


def sample_groups(subject: Subject, count: int, seed: int) -> SampleGroups:
    """Consecutive samples as groups, whose quarters are drawn at random from the group's samples.

    The fixed order of samples is class-balanced, so that groups are alike and their means are closer to each other
    than those of independent samples. Quarters that were consecutive too would understate the variance of a sample;
    after shuffling inside the group they show all of it. What does not fill the last group is left out. Samples that
    cannot be separated stay in their mini-batches, of which a quarter has at least one, in the order given.

    Raises:
        ValueError: there are too few samples, or mini-batches.
    """
    each = quarter_size(subject, count)
    starts = np.arange(count * QUARTERS).reshape(count, QUARTERS) * each
    if not subject.divisible:
        return SampleGroups(
            subject, tuple(tuple(_of_batches(subject, at, each) for at in row) for row in starts.tolist())
        )
    if subject.images is not None:
        subject = _shuffled_inside(subject, count, QUARTERS * each, seed)
    batches = range(len(subject.batches))
    sizes = [subject.samples(i) for i in batches]

    def quarter(at: int) -> Quarter:
        return Quarter(tuple(_consecutive(batches, sizes, at, at + each, each)), each)

    return SampleGroups(subject, tuple(tuple(map(quarter, row)) for row in starts.tolist()))


def _shuffled_inside(subject: Subject, count: int, size: int, seed: int) -> Subject:
    """The same samples, those of every group in a random order."""
    order = np.arange(count * size)
    for i in range(count):
        generator = torch.Generator().manual_seed(derived_seed(seed, "order", i))
        order[i * size : (i + 1) * size] = i * size + torch.randperm(size, generator=generator).numpy()
    return replace(other_samples.on_rows(subject, order), spec=subject.spec)


def _of_batches(subject: Subject, start: int, count: int) -> Quarter:
    """Consecutive mini-batches."""
    sizes = {i: subject.samples(i) for i in range(start, start + count)}
    total = sum(sizes.values())
    return Quarter(tuple(Share(i, WHOLE, size / total) for i, size in sizes.items()), total)


def mean_gradient(subject: Subject, parameters: Mapping[str, Tensor], quarter: Quarter) -> tuple[Tensor, Tensor]:
    """Gradient of loss + weight decay on a quarter, flat, (n,), and the loss without weight decay, ()."""
    weights = list(parameters.values())
    gradient = subject.weight_decay * flat(weights).detach()
    loss = torch.zeros((), device=gradient.device)
    for share in quarter.shares:
        inputs, targets = part_of(subject, share.batch, share.part)
        with torch.enable_grad(), restoration.evaluation_mode(subject.model):
            value = subject.losses(subject.outputs(inputs), targets).mean()
        of_share = loss_gradients(value, weights)
        gradient.add_(flat(of_share), alpha=share.weight)
        loss = loss + share.weight * value.detach()
    return gradient, loss


def mean_products(curved: Curvature, quarters: Sequence[Quarter], vectors: Sequence[Tensor]) -> Iterator[Tensor]:
    """H v for several vectors, (n,) each, with the Hessian of the mean over several quarters."""
    total = sum(quarter.samples for quarter in quarters)
    sums = [torch.zeros_like(vector) for vector in vectors]
    for quarter in quarters:
        for share in quarter.shares:
            product = curved.product(share.batch, share.part)
            for found, vector in zip(sums, vectors, strict=True):
                found.add_(product(vector), alpha=share.weight * quarter.samples / total)
    yield from sums

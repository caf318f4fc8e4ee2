"""Divide samples into groups of four quarters, and compute gradients and Hessian products on a quarter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landscape.probe import derived_seed
from landscape.products.mini_batch_means import Share
from landscape.products.operator import WHOLE, Curvature, part_of
from landscape.products.vectors import flat
from landscape.subject.other_samples import on_rows
from landscape.subject.restoration import evaluation_mode
from landscape.subject.subject import Subject

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
            f"--groups {count} needs {QUARTERS * count} {what}, four per group, got {found}; raise --samples"
            + (f", or give at most --groups {found // QUARTERS}" if found >= 3 * QUARTERS else "")
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
    ends = np.cumsum([subject.samples(i) for i in range(len(subject.batches))])
    return SampleGroups(subject, tuple(tuple(_of_samples(ends, at, each) for at in row) for row in starts.tolist()))


def _shuffled_inside(subject: Subject, count: int, size: int, seed: int) -> Subject:
    """The same samples, those of every group in a random order."""
    order = np.arange(count * size)
    for i in range(count):
        generator = torch.Generator().manual_seed(derived_seed(seed, "order", i))
        order[i * size : (i + 1) * size] = i * size + torch.randperm(size, generator=generator).numpy()
    return replace(on_rows(subject, order), spec=subject.spec)


def _of_samples(ends: np.ndarray, start: int, count: int) -> Quarter:
    """Consecutive samples, by the mini-batches that they are in; `ends` are the positions after each mini-batch."""
    first, last = np.searchsorted(ends, (start, start + count - 1), side="right").tolist()
    shares = []
    for i in range(first, last + 1):
        at = int(ends[i - 1]) if i else 0
        low, high = max(start - at, 0), min(start + count, int(ends[i])) - at
        part = WHOLE if (low, high) == (0, int(ends[i]) - at) else slice(low, high)
        shares.append(Share(i, part, (high - low) / count))
    return Quarter(tuple(shares), count)


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
        with torch.enable_grad(), evaluation_mode(subject.model):
            value = subject.losses(subject.outputs(inputs), targets).mean()
        of_share = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
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

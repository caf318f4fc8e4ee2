"""Flat vectors for lists of parameters, random unit vectors, and inner products in float64."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from landscape.random_vectors import normal

ROW, ROWS = 4096, 32
BLOCK = 2**20  # entries converted to float64 at once

GROWTH = 32  # vectors for which a growing basis takes memory at once


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in order, (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector with the shapes of `like`."""
    pieces = torch.split(vector, [tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def random_unit(size: int, seed: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A uniformly random unit vector: the same on every device, but for the rounding of its length."""
    vector = normal(size, seed, device=device, dtype=dtype)
    return vector.div_(length(vector).to(dtype))


def dot(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> of flat vectors, summed in float64: in single precision the error is 1e-5 from 1e5 entries on."""
    blocks = zip(torch.split(left, BLOCK), torch.split(right, BLOCK), strict=True)
    return torch.stack([torch.dot(a.double(), b.double()) for a, b in blocks]).sum()


def length(vector: Tensor) -> Tensor:
    """||vector||, summed in float64 as in `dot`."""
    norm: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return norm


def inner(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """<left, right> over lists of tensors, in float64; bit-identical for any number of threads."""
    return float(sum(_inner(a.reshape(-1), b.reshape(-1)) for a, b in zip(left, right, strict=True)))


def inner_products(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """<a, b> of every pair of tensors, as `inner`, by one transfer from the device."""
    products: list[float] = torch.stack([_inner(a.reshape(-1), b.reshape(-1)) for a, b in pairs]).tolist()
    return products


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> of vectors, summed by rows of one thread each: torch would split a long sum among all its threads.

    Some rows at a time, so that the copies in float64 stay small.
    """
    whole = len(a) // ROW * ROW
    blocks = zip(torch.split(a[:whole], ROWS * ROW), torch.split(b[:whole], ROWS * ROW), strict=True)
    rows = [(x.double() * y.double()).view(-1, ROW).sum(dim=1) for x, y in blocks]
    rest = (a[whole:].double() * b[whole:].double()).sum()
    return torch.cat(rows).sum() + rest

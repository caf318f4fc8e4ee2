"""Flat vectors for lists of parameters, random unit vectors, and inner products in float64."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from landscape.random_vectors import normal

ROW = 4096  # entries that are summed by one thread
CPU_BLOCK, BLOCK = 2**16, 2**25  # entries converted to float64 at once, on a CPU so that they stay in its cache
GROWTH = 32  # vectors for which a growing basis takes memory at once
Pair: TypeAlias = tuple[Tensor, Tensor]


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
    return torch.dot(left.double(), right.double()) if len(left) <= CPU_BLOCK else _inner([(left, right)])


def length(vector: Tensor) -> Tensor:
    """||vector||, summed in float64 as in `dot`, and in parts, because torch makes a copy in float64."""
    norms: list[Tensor] = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in torch.split(vector.reshape(-1), BLOCK)
    ]
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total


def joint_length(parts: Sequence[Tensor]) -> float:
    """The length of the vector that tensors make up: rows of `ROW` entries in their precision, added up in float64.

    An eighth of the time of `length`, which takes over where squares of single entries may leave the range of numbers.
    """
    norms = [torch.linalg.vector_norm(rows, dim=-1) for rows in _rows(parts)]
    found = float(length(torch.cat([norm.double() for norm in norms])))
    return found if 1e-12 < found < 1e12 else float(torch.stack([length(part) for part in parts]).square().sum().sqrt())


def joint_inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """<left, right> of the vectors that tensors make up, as in `joint_length`; else by `inner`."""
    pairs = zip(_rows(left), _rows(right), strict=True)
    found = float(torch.cat([(a * b).sum(dim=-1).double() for a, b in pairs]).sum())
    return found if 1e-24 < abs(found) < 1e24 else inner(left, right)


def _rows(parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """The entries of tensors in rows of `ROW`, (rows, ROW), and of what is left one shorter row, small ones joined."""
    vectors = [part.reshape(-1).to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    small = [vector for vector in vectors if len(vector) <= CPU_BLOCK]
    for vector in [*(v for v in vectors if len(v) > CPU_BLOCK), *([torch.cat(small)] if small else [])]:
        cut = len(vector) // ROW * ROW
        yield vector[:cut].view(-1, ROW)
        yield vector[cut:].view(1, -1)


def inner(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """<left, right> over lists of tensors, in float64; bit-identical for any number of threads."""
    return float(_inner(zip(left, right, strict=True)))


def inner_products(pairs: Iterable[Pair]) -> list[float]:
    """<a, b> of every pair of tensors, as `inner`, by one transfer from the device."""
    products: list[float] = torch.stack([_inner([pair]) for pair in pairs]).tolist()
    return products


def _inner(pairs: Iterable[Pair]) -> Tensor:
    """The sum of <a, b> over pairs, by rows of one thread each: torch would split a long sum among all its threads."""
    whole: list[Pair] = []
    rest: list[Pair] = []  # what the whole rows of each pair leave, which are joined
    for a, b in ((a.reshape(-1), b.reshape(-1)) for a, b in pairs):
        cut = len(a) // ROW * ROW
        whole.append((a[:cut], b[:cut]))
        rest.append((a[cut:], b[cut:]))
    if not rest:
        return torch.zeros((), dtype=torch.float64)
    a, b = _joined(rest)
    cut = len(a) // ROW * ROW
    whole.append((a[:cut], b[:cut]))
    rows = [(x.double() * y).view(-1, ROW).sum(dim=1) for x, y in _blocks(whole)]
    return torch.cat(rows).sum() + (a[cut:].double() * b[cut:]).sum()


def _blocks(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """The vectors in parts of few entries, short ones joined, so that copies in float64 stay small."""
    held: list[Pair] = []
    size = 0
    for a, b in pairs:
        most = CPU_BLOCK if a.device.type == "cpu" else BLOCK
        for x, y in zip(torch.split(a, most), torch.split(b, most), strict=True):
            if held and size + len(x) > most:
                yield _joined(held)
                held, size = [], 0
            held.append((x, y))
            size += len(x)
    yield _joined(held)


def _joined(pairs: Sequence[Pair]) -> Pair:
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])

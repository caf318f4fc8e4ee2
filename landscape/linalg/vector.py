"""Lists of parameters as one flat vector, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in order, (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat vector with the shapes of `like`."""
    pieces = torch.split(vector, [tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def random_unit(size: int, seed: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A uniformly random unit vector from its own generator: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    vector = torch.randn(size, generator=generator, dtype=drawn).to(device, dtype)
    return vector.div_(vector.norm())


def inner(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """<left, right> over lists of tensors, accumulated in float64."""
    return float(sum((a.double() * b.double()).sum() for a, b in zip(left, right, strict=True)))

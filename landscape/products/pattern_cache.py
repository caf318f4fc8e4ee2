"""Keep activation patterns in memory: that of the last mini-batch, or those of all mini-batches in compact form."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

MOST_BYTES = 2**31  # of the patterns of all mini-batches
ON_DEVICE = 8  # share of an accelerator's free memory that they may take: 1 / 8
Key: TypeAlias = tuple[int, int | None, int | None]  # mini-batch, slice of it


class PatternCache:
    """The activation patterns of mini-batches, as `kinks.activation_pattern` gives them.

    Args:
        every: keep those of all mini-batches, a byte per unit and four per maximum of a pooling, instead of the last
            one as it is.
        device: where all are kept.
    """

    def __init__(self, *, every: bool = False, device: torch.device | None = None) -> None:
        self._every, self._device = every, device
        self._patterns: dict[Key, tuple[list[Tensor], torch.device | None]] = {}

    def get(self, key: Key) -> list[Tensor] | None:
        """The pattern, None if it is not kept."""
        if key not in self._patterns:
            return None
        pattern, device = self._patterns[key]
        return [_expanded(tensor.to(device)) for tensor in pattern] if self._every else pattern

    def put(self, key: Key, pattern: list[Tensor]) -> None:
        """Keep a pattern."""
        if not self._every:
            self._patterns.clear()
            self._patterns[key] = pattern, None
            return
        device = pattern[0].device if pattern else None
        self._patterns[key] = [_compact(tensor).to(self._device) for tensor in pattern], device


def compact_bytes(pattern: Sequence[Tensor]) -> int:
    """Bytes that a pattern takes where all mini-batches are kept."""
    return sum(_compact(tensor).nbytes for tensor in pattern)


def place_for(size: int, device: torch.device) -> torch.device:
    """Where so many bytes of patterns are kept: an accelerator with plenty of free memory, else the CPU."""
    if device.type == "cuda" and ON_DEVICE * size <= torch.cuda.mem_get_info(device)[0]:
        return device
    return torch.device("cpu")


def _compact(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():  # sides: -1, 0, 1
        return tensor.to(torch.int8)
    return tensor.int() if tensor.numel() and int(tensor.max()) < 2**31 else tensor  # positions of maxima


def _expanded(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.int8 else tensor.long()

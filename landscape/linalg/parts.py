"""Feature maps a few images at a time: intermediate results stay small, and on a CPU in its caches."""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = {"cpu": 2**18}  # of a part; elsewhere many more, where small kernels cost more than memory does
ELSEWHERE = 2**26


def parts(maps: Tensor) -> tuple[Tensor, ...]:
    """A batch (N, ...) in consecutive parts of whole images."""
    each = max(1, maps[0].numel()) if len(maps) else 1
    found: tuple[Tensor, ...] = torch.split(maps, max(1, NUMBERS.get(maps.device.type, ELSEWHERE) // each))
    return found

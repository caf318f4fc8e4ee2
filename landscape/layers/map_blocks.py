"""Feature maps a few images at a time: intermediate results stay small, and on a CPU in its caches."""

from __future__ import annotations

import torch
from torch import Tensor

NUMBERS = 2**18  # of a part on a CPU
ELSEWHERE = 2**26  # many more, where small kernels cost more than memory does


def parts(maps: Tensor, numbers: int | None = None) -> tuple[Tensor, ...]:
    """A batch (N, ...) in consecutive parts of whole images, of so many numbers on a CPU."""
    each = max(1, maps[0].numel()) if len(maps) else 1
    most = (numbers or NUMBERS) if maps.device.type == "cpu" else ELSEWHERE
    found: tuple[Tensor, ...] = torch.split(maps, max(1, most // each))
    return found

"""What a plane through three checkpoints moves beside its directions: batch norm's statistics, frozen weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from landscape.subject.subject import Subject


class Between:
    """Tensors of the model between those of three checkpoints, written in place.

    Each is the mean of the three with the point's barycentric shares, so that every corner has its own, bit for bit.
    Beyond the triangle a share below 0 counts as 0: an extrapolated variance may turn negative.

    Args:
        subject: whose model is written; its own tensors are those of (0, 0).
        first: name -> tensor at (1, 0).
        second: the same at (0, 1).
    """

    def __init__(self, subject: Subject, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
        named: dict[str, Tensor] = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
        self._live = [named[name].data for name in first]
        self._origin = [tensor.clone() for tensor in self._live]
        self._first, self._second = list(first.values()), [second[name] for name in first]

    def place(self, x: float, y: float) -> None:
        """Write those of a point."""
        one, other = shares(x, y)
        if other == 1.0:
            torch._foreach_copy_(self._live, self._second)
            return
        torch._foreach_copy_(self._live, self._origin)
        torch._foreach_lerp_(self._live, self._first, one / (1.0 - other))
        torch._foreach_lerp_(self._live, self._second, other)

    def restore(self) -> None:
        """Write the subject's own."""
        torch._foreach_copy_(self._live, self._origin)


def shares(x: float, y: float) -> tuple[float, float]:
    """Shares of the checkpoints at (1, 0) and (0, 1), that at (0, 0) has the rest; none below 0."""
    parts = [max(part, 0.0) for part in (1.0 - x - y, x, y)]
    return parts[1] / sum(parts), parts[2] / sum(parts)

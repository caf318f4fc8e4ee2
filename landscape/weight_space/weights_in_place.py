"""Write weights into a model in place, and restore it bit for bit, batch norm's statistics included."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from landscape.options import counted
from landscape.subject import batchnorm
from landscape.subject.subject import Subject

Tensors = Mapping[str, Tensor]  # by name, of the dtype and on the device of the model's own


class WeightsInPlace(contextlib.AbstractContextManager["WeightsInPlace"]):
    """A context manager that overwrites parameters and buffers of a subject's model.

    Every write starts from the original tensors: steps added to each other would drift. On exit, also after an
    exception, the named tensors and all buffers (batch norm's running statistics) have their original bits.
    """

    def __init__(self, subject: Subject, names: Iterable[str]) -> None:
        self._subject = subject
        tensors: dict[str, Tensor] = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
        # of a tensor divided among processes, the part that this one holds
        self._live = {name: getattr(tensors[name].data, "_local_tensor", tensors[name].data) for name in names}
        self.original = {name: tensor.clone() for name, tensor in self._live.items()}
        self._buffers = batchnorm.statistics(subject.model)

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        torch._foreach_copy_(list(self._live.values()), list(self.original.values()))
        batchnorm.restore(self._subject.model, self._buffers)

    def translate(self, *steps: tuple[Tensors, float]) -> None:
        """Write w + sum of length * direction, where every direction names the same tensors."""
        (first, length), *rest = steps
        live, original = self._select(first)
        if self._subject.device.type == "cpu":  # limited by memory bandwidth: one pass less
            for tensor, start, change in zip(live, original, first.values(), strict=True):
                torch.add(start, change, alpha=length, out=tensor)
        else:  # limited by kernel launches: two, whatever the number of tensors
            torch._foreach_copy_(live, original)
            torch._foreach_add_(live, list(first.values()), alpha=length)
        for direction, length in rest:
            torch._foreach_add_(live, [direction[name] for name in first], alpha=length)

    def interpolate(
        self, first: Tensors, share: float, second: Tensors | None = None, second_share: float = 0.0
    ) -> None:
        """Write (1 - share - second_share) w + share * first + second_share * second; exact where a share is 1."""
        if not first:
            return
        live, original = self._select(first)
        ends = [list(first.values()), [second[name] for name in first] if second is not None else []]
        if second_share == 1.0:
            torch._foreach_copy_(live, ends[1])
            return
        torch._foreach_copy_(live, original)
        torch._foreach_lerp_(live, ends[0], share / (1.0 - second_share))
        if second is not None:
            torch._foreach_lerp_(live, ends[1], second_share)

    def _select(self, names: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        return [self._live[name] for name in names], [self.original[name] for name in names]


def barycentric(x: float, y: float) -> tuple[float, float]:
    """Shares of the corners (1, 0) and (0, 1) of a triangle; (0, 0) has the rest.

    Outside the triangle a negative share counts as 0: an extrapolated variance may turn negative.
    """
    shares = [max(share, 0.0) for share in (1.0 - x - y, x, y)]
    return shares[1] / sum(shares), shares[2] / sum(shares)


@dataclass(frozen=True)
class RunningStatistics:
    """Batch norm's at a point of a line or plane (`--bn`): by default frozen, those of the checkpoint everywhere."""

    interpolate: bool = False  # between checkpoints, together with all else that no direction moves
    recalibrate: int = 0  # mini-batches over which they are averaged anew at every point; 0 for none

    @classmethod
    def parse(cls, text: str, *, interpolate: bool = False) -> "RunningStatistics":
        """The value of `--bn`; `interpolate`: whether there are checkpoints to interpolate between.

        Raises:
            OptionError: the text has no meaning.
        """
        if text in batchnorm.INTERPOLATING:
            return cls(interpolate=interpolate)
        return cls(recalibrate=batchnorm.recalibration(text))

    def __str__(self) -> str:
        """As stored with the result."""
        if self.interpolate:
            return "interpolated between the checkpoints"
        batches = counted(self.recalibrate, "mini-batch")
        return f"refreshed on {batches} at every point" if self.recalibrate else "frozen"


FROZEN = RunningStatistics()
OWN = RunningStatistics(interpolate=True)  # every checkpoint has its own

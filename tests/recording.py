"""A stand-in for CUDA graphs on a CPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from landscape.subject.graph_replay import Work


class Recorder:
    """Stands for CUDA graphs: replays write to the results of the recording, from the arguments at its addresses.

    They are `wrong_by` something, or `stale`: what the first replay gave, whatever is at the addresses now. Of a
    recording that `misses` a kernel the last result is what was computed while it was made.
    """

    def __init__(self, *, wrong_by: float = 0.0, stale: bool = False, misses: bool = False) -> None:
        self.recordings, self.replays, self.wrong_by, self.stale, self.misses = 0, 0, wrong_by, stale, misses

    def __call__(self, work: Work, device: torch.device) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self.recordings += 1
        first = [result.clone() for result in work()]
        known: list[Tensor] = []
        results = [torch.full_like(result, -7) for result in first]

        def replay() -> None:
            self.replays += 1
            found = list(known if self.stale and known else work())
            known[:] = [result.clone() for result in found]
            if self.misses:
                found[-1] = first[-1]
            for result, new in zip(results, found, strict=True):
                result.copy_(new + self.wrong_by if self.wrong_by else new)

        return replay, results

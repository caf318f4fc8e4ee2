"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from landscape.subject.graph_replay import Work


class Recorder:
    """Stands for CUDA graphs: replays write to the results of the recording, from the arguments at its addresses."""

    def __init__(self, *, wrong_by: float = 0.0) -> None:
        self.recordings, self.replays, self.wrong_by = 0, 0, wrong_by

    def __call__(self, work: Work, device: torch.device) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self.recordings += 1
        results = [torch.full_like(result, torch.nan) for result in work()]

        def replay() -> None:
            self.replays += 1
            for result, new in zip(results, work(), strict=True):
                result.copy_(new + self.wrong_by)

        return replay, results

"""Keep the exponential moving average of a network's weights (Polyak & Juditsky 1992; as in Tarvainen & Valpola)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

WARMUP = 10  # sets how fast the decay rises over the first updates


def moving_average(network: nn.Module, decay: float) -> AveragedModel:
    """An average that starts from the present weights; `update_parameters(network)` adds those after an update.

    Update t = 1, 2, ... makes a <- d a + (1 - d) w with d = min(decay, (1 + t) / (10 + t)). The rising d forgets the
    initial weights also in a run shorter than 1 / (1 - decay) updates. Floating-point buffers, which are batch norm's
    statistics, are averaged like the weights; counters are copied.
    """

    def update(averaged: Any, current: Any, _: Tensor | int) -> None:
        t = int(model.n_averaged)  # on the CPU, unlike the argument, so that nothing waits for a GPU
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - min(decay, (1 + t) / (WARMUP + t)))
        else:
            torch._foreach_copy_(averaged, current)

    model = AveragedModel(network, multi_avg_fn=update, use_buffers=True)
    model.update_parameters(network)  # the first call copies the weights, and makes the next one t = 1
    return model

"""The exponential moving average of a network's weights (Polyak & Juditsky 1992; in this form Tarvainen & Valpola)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WARM = 10  # updates after which an average of a slow decay begins to be slow


class Average:
    """After every update a <- d a + (1 - d) w with d = min(decay, (1 + t) / (10 + t)), t = 1, 2, ... updates.

    The rising d forgets the initial weights also in a run shorter than 1 / (1 - decay) updates. Floating-point
    buffers, which are batch norm's statistics, are averaged as the weights are; counters are copied.

    Args:
        network: whose present weights the average starts from.
        decay: at least 0 and less than 1.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay, self._updates = decay, 0
        self.state_dict = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Take in the weights after one more update."""
        self._updates += 1
        decay = min(self._decay, (1 + self._updates) / (WARM + self._updates))
        kept: list[Tensor] = []
        new: list[Tensor] = []
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                kept.append(self.state_dict[name])
                new.append(tensor)
            else:
                self.state_dict[name].copy_(tensor)
        torch._foreach_lerp_(kept, new, 1 - decay)

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"updates": self._updates, "state_dict": self.state_dict}

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        self._updates = state["updates"]
        for name, tensor in state["state_dict"].items():
            self.state_dict[name].copy_(tensor)

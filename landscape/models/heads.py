"""What follows the last feature map of a residual network: `gap`, `bn-gap` or `mlp`, each ending in a linear layer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

Head = Literal["gap", "bn-gap", "mlp"]


class Average(nn.Module):
    """Mean over positions, (batch, channel, height, width) to (batch, channel)."""

    def forward(self, x: Tensor) -> Tensor:
        """The mean."""
        return x.mean((2, 3))


def pooling(head: Head, features: int) -> nn.Module:
    """What lies between the last map and the linear classifier.

    Args:
        head: `gap` averages over positions; `bn-gap` norms and rectifies before; `mlp` has a hidden layer after it, as
            wide as the map.
        features: channels of the map.
    """
    if head == "bn-gap":
        return nn.Sequential(nn.BatchNorm2d(features), nn.ReLU(), Average())
    if head == "mlp":
        return nn.Sequential(Average(), nn.Linear(features, features), nn.ReLU())
    return Average()

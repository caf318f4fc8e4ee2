"""Spatial smoothing and Monte-Carlo dropout (Park & Kim 2022, "Blurs Behave Like Ensembles", arXiv 2105.12639)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOUND = 10.0  # t of t tanh(x / t), the paper's


class Smoothing(nn.Module):
    """blur(relu(t tanh(x / t))): features bounded, rectified, and averaged over 2 x 2 positions, without parameters.

    The blur has stride 1 and repeats the last row and column, so that the map keeps its size and a constant one its
    values.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to the same."""
        bounded = F.relu(BOUND * torch.tanh(x / BOUND))
        return F.avg_pool2d(F.pad(bounded, (0, 1, 0, 1), mode="replicate"), 2, stride=1)


def mc_dropout(x: Tensor, rate: float) -> Tensor:
    """Dropout that is on at test time too: every forward pass is one sample of the network's predictions.

    A function and not a module, for the same reason as `drop_path`.
    """
    return F.dropout(x, rate, training=True) if rate else x


@torch.no_grad()
def averaged(model: nn.Module, images: Tensor, passes: int) -> Tensor:
    """Probabilities of a stochastic network, averaged over forward passes (not logits), (N, classes)."""
    total = torch.zeros(())
    for _ in range(passes):
        total = total + model(images).softmax(dim=1)
    return total / passes

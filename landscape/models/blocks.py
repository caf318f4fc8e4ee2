"""Stochastic depth (Huang et al. 2016, arXiv 1603.09382): whole residual branches dropped, sample by sample.

A function and not a module: nothing stands between a branch and the sum it enters, so that whoever listens to
the network finds the branch under the name of what computed it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def drop_path(branch: Tensor, rate: float, *, training: bool) -> Tensor:
    """The branch, in training zero for a random `rate` of the samples and divided by 1 - rate for the others.

    The expectation is the branch itself, which is also what evaluation returns.

    Args:
        branch: output of a residual branch, samples along the first axis.
        rate: probability of dropping a sample's branch, in [0, 1).
        training: whether to drop at all.
    """
    if not training or rate == 0.0:
        return branch
    shape = (len(branch),) + (1,) * (branch.ndim - 1)
    kept = torch.rand(shape, dtype=branch.dtype, device=branch.device) >= rate
    return branch * kept / (1.0 - rate)


def drop_path_rates(last: float, depth: int) -> list[float]:
    """Rates that rise linearly from 0 at the first block to `last` at the last one."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]


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

"""Batch norm over the mini-batch of all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Synchronised(nn.BatchNorm2d):
    """Batch norm whose mean and variance in training are those of all processes' samples together.

    Torch's own works on GPUs alone. Two sums go around in each direction: the mean's, then the centred squares'.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to the same."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        count = _summed(torch.full((), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device))
        mean = _summed(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = _summed(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            share = self.momentum or 0.0
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * count / (count - 1), share)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        scale: Tensor = torch.rsqrt(variance + self.eps) * self.weight
        out: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return out.to(x.dtype)


def synchronise(network: nn.Module) -> None:
    """Give every batch norm of a network the statistics of all processes, in place; parameters and names stay."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = Synchronised


class _Sum(torch.autograd.Function):
    """The sum over processes; every process's output depends on all inputs alike, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def _summed(value: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(value)  # type: ignore[no-untyped-call]
    return total

"""Synchronise batch norm over all processes, on CPUs and GPUs; `nn.SyncBatchNorm` rejects CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SynchronisedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose training statistics are the mean and variance of all processes' samples together.

    Each direction exchanges two sums: that of the values, then that of the centred squares.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channel, height, width) to the same."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return super().forward(x)
        wide = x if x.dtype == torch.float64 else x.float()
        count = _all_reduced(torch.full((), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device))
        mean = _all_reduced(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = _all_reduced(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            share = self.momentum or 0.0
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(variance * count / (count - 1), share)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        scale: Tensor = torch.rsqrt(variance + self.eps) * self.weight
        out: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return out.to(x.dtype)


def synchronise_batchnorm(network: nn.Module) -> None:
    """Turn every batch norm of a network into a synchronised one, in place; parameters and names stay."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SynchronisedBatchNorm2d


class _AllReduce(torch.autograd.Function):
    """The sum over processes; each process's output depends on all inputs alike, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduced(gradient)


def _all_reduced(value: Tensor) -> Tensor:
    total: Tensor = _AllReduce.apply(value)  # type: ignore[no-untyped-call]
    return total

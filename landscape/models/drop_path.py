"""Stochastic depth (Huang et al. 2016, arXiv 1603.09382): whole residual branches dropped, sample by sample.

A function and not a module: nothing stands between a branch and the sum it enters, so that whoever listens to
the network finds the branch under the name of what computed it.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

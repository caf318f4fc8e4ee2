"""Unbiased HSIC of linear kernels, the part of centred kernel alignment that adds up over mini-batches.

Song et al. 2012 (Eq. 5) give the estimator; Nguyen et al. 2021 (Eq. 3) average it over mini-batches before the ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from landscape.curvature.matrix_products import matmul
from landscape.layers.map_blocks import parts

NUMBERS = 2**19  # of the features in one product
FEW = 8
ROWS = 32  # of a kernel at a time: a symmetric product in fewer operations
LEAST = 4  # samples of a mini-batch: the estimator divides by n (n - 3)


def centred_kernel(features: Tensor) -> Tensor:
    """The U-centred linear kernel of one layer's features, (n, n) float64 with a diagonal of zeros.

    K - row mean - column mean + mean, the means without the diagonal (Szekely & Rizzo 2014). It does not see a shift of
    all samples: the mean of a few is taken off first, so that what is left has no large numbers to cancel.

    Args:
        features: (sample, ...), flattened; at least `LEAST` samples.
    """
    n, flat = len(features), features.flatten(1)
    kernel = torch.zeros(n, n, dtype=torch.float64, device=features.device)
    for columns in parts(flat.T, NUMBERS):  # some features at a time, all samples of them
        part = columns.T - columns[:, :FEW].mean(dim=1)
        for row in range(0, n, ROWS):  # the lower half
            kernel[row:, row : row + ROWS] += matmul(part[row:], part[row : row + ROWS].T)
    kernel = kernel.tril(-1)
    kernel = kernel + kernel.T
    rows = kernel.sum(dim=1) / (n - 2)
    total = kernel.sum() / ((n - 1) * (n - 2))
    return (kernel - rows[:, None] - rows[None, :] + total).fill_diagonal_(0.0)


def hsic(one: Tensor, other: Tensor) -> Tensor:
    """Unbiased HSIC of every pair of U-centred kernels, (layer, n, n), (other, n, n) to (layer, other).

    NaN below `LEAST` samples.
    """
    n = one.shape[-1]
    if n < LEAST:
        return torch.full((len(one), len(other)), torch.nan, dtype=one.dtype, device=one.device)
    return one.flatten(1) @ other.flatten(1).T / (n * (n - 3))


def hsic_of_itself(kernels: Tensor) -> Tensor:
    """Unbiased HSIC of every kernel with itself, (layer,)."""
    n = kernels.shape[-1]
    if n < LEAST:
        return torch.full((len(kernels),), torch.nan, dtype=kernels.dtype, device=kernels.device)
    squares: Tensor = torch.linalg.vector_norm(kernels.flatten(1), dim=1).square()
    return squares / (n * (n - 3))

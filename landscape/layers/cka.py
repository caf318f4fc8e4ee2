"""Unbiased HSIC of linear kernels: the quantities that centred kernel alignment (CKA) sums over mini-batches.

Song et al. 2012 (Eq. 5) give the estimator; Nguyen et al. 2021 (Eq. 3) average it over mini-batches before the ratio.
"""

import torch
from torch import Tensor

from landscape.discovery.layer import chunks
from landscape.products.matrix_products import matmul

CHUNK = 2**20  # numbers of the features in one product
SHIFT_SAMPLES = 8  # whose mean is subtracted
ROWS = 64  # of a kernel at a time: only the lower half is computed
LEAST_SAMPLES = 4  # of a mini-batch: the estimator divides by n (n - 3)


def centred_kernel(features: Tensor) -> Tensor:
    """The U-centred linear kernel of features (sample, ...), (n, n) float64 with a diagonal of zeros; NaN for n < 4.

    K - row mean - column mean + mean, the means without the diagonal (Szekely & Rizzo 2014). It is invariant to a shift
    of all samples: the mean of a few is subtracted first, so that no large numbers cancel. Products of features are in
    their own precision; only their sums, n x n, are float64, also on GPUs that are slow in it.
    """
    n, flat = len(features), features.detach().flatten(1)
    kernel = torch.zeros(n, n, dtype=torch.float64, device=features.device)
    if n < LEAST_SAMPLES:
        return kernel.fill_(torch.nan)
    parts = chunks(flat.T, CHUNK)  # (some features, all samples)
    kept = torch.empty_like(parts[0].T)  # once: the system clears new memory
    for columns in parts:
        shift = columns[:, :SHIFT_SAMPLES].mean(dim=1)
        part = torch.sub(columns.T, shift, out=kept[:, : len(columns)])
        for row in range(0, n, ROWS):  # the lower half
            kernel[row:, row : row + ROWS] += matmul(part[row:], part[row : row + ROWS].T)
    kernel = kernel.tril(-1)
    kernel = kernel + kernel.T
    rows = kernel.sum(dim=1) / (n - 2)
    total = kernel.sum() / ((n - 1) * (n - 2))
    return (kernel - rows[:, None] - rows[None, :] + total).fill_diagonal_(0.0)


def hsic(one: Tensor, other: Tensor) -> Tensor:
    """Unbiased HSIC of every two U-centred kernels, (layer, n, n), (other, n, n) to (layer, other)."""
    n = one.shape[-1]
    return one.flatten(1) @ other.flatten(1).T / (n * (n - 3))


def hsic_of_itself(kernels: Tensor) -> Tensor:
    """Unbiased HSIC of every kernel with itself, (layer,)."""
    n = kernels.shape[-1]
    squares: Tensor = torch.linalg.vector_norm(kernels.flatten(1), dim=1).square()
    return squares / (n * (n - 3))

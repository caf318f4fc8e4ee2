"""Rings of frequencies in the plane of a two-dimensional Fourier transform, and noise that has only those."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUNDING = 1e-9  # of a sum of decimal fractions: a frequency on the edge of a ring belongs to it


def ring(height: int, width: int, low: float, high: float) -> np.ndarray:
    """Where low <= max(|fx|, |fy|) <= high, (H, W) bool in the order of the FFT; frequencies in units of pi.

    Symmetric about zero frequency, so that what passes of a real signal is real.
    """
    rows, columns = (2 * np.abs(np.fft.fftfreq(n)) for n in (height, width))
    radius = np.maximum(rows[:, None], columns[None, :])
    return np.asarray((radius >= low - ROUNDING) & (radius <= high + ROUNDING))


def passed(spectrum: Tensor, mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Re IFFT2(FFT2(x) M) from the half spectrum of a real x.

    Args:
        spectrum: `torch.fft.rfft2(x)`, (..., H, W // 2 + 1).
        mask: a symmetric M, (H, W) bool.
        size: (H, W).
    """
    back: Tensor = torch.fft.irfft2(spectrum * mask[:, : size[1] // 2 + 1], s=size)
    return back


def signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Independent random signs, float32: sign(N(0, 1)).

    Taken from the raw stream of a bit generator, the same with every version of numpy and on every platform.
    """
    count = int(np.prod(shape))
    words = np.random.PCG64(seed).random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=count).astype(np.float32)
    return torch.from_numpy(2 * bits - 1).reshape(shape)

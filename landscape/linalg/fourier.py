"""Log amplitudes of feature maps along the half diagonal of their Fourier spectrum (Park & Kim 2022, Fig. 2)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def diagonal_frequencies(height: int, width: int) -> np.ndarray:
    """True frequencies of the half diagonal, in units of pi, from 0 upward.

    The shorter side decides: for even n the last is (n/2 - 1)/(n/2), for odd n it is (n - 1)/n.
    """
    n = min(height, width)
    return np.arange((n + 1) // 2) * 2.0 / n


def log_amplitude_diagonal(maps: Tensor) -> Tensor:
    """ln(|FFT2(z)| + 1e-6) along the half diagonal, unnormalised FFT, before any averaging.

    Where the sides differ the diagonal is taken at equal physical frequency, by linear interpolation along the longer
    side.

    Args:
        maps: (N, C, H, W).

    Returns:
        (N, C, bins), bins as in `diagonal_frequencies`.
    """
    height, width = maps.shape[-2:]
    if height > width:
        return log_amplitude_diagonal(maps.transpose(-1, -2))
    half = (height + 1) // 2
    rows = torch.arange(half, device=maps.device)
    spectrum = torch.fft.rfft2(maps.float() if maps.dtype != torch.float64 else maps)  # columns 0 .. W // 2
    if height == width:
        return torch.log(spectrum[..., rows, rows].abs() + 1e-6)
    amplitude = torch.log(spectrum[..., :half, :].abs() + 1e-6)
    columns = rows.to(amplitude.dtype) * width / height
    left = columns.floor().long()
    right = (left + 1).clamp_max(width // 2)
    share = columns - left
    return torch.lerp(amplitude[..., rows, left], amplitude[..., rows, right], share)


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """DeltaLogA(f) = A(f, f) - A(0, 0), mean over channels, (N, bins) float64."""
    diagonal = log_amplitude_diagonal(maps)
    return (diagonal - diagonal[..., :1]).mean(dim=1, dtype=torch.float64)

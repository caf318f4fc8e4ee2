"""Log amplitudes of the Fourier spectra of feature maps, and along their half diagonal (Park & Kim 2022, Fig. 2)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FLOOR = 1e-6  # added to amplitudes before the logarithm


def diagonal_frequencies(height: int, width: int) -> np.ndarray:
    """True frequencies of the half diagonal, in units of pi, from 0 upward.

    The shorter side decides: for even n the last is (n/2 - 1)/(n/2), for odd n it is (n - 1)/n.
    """
    n = min(height, width)
    return np.arange((n + 1) // 2) * 2.0 / n


def frequencies(n: int) -> np.ndarray:
    """True frequencies of an axis of n positions, zero in the centre, in units of pi."""
    return np.fft.fftshift(np.fft.fftfreq(n)) * 2.0


def half_spectrum(maps: Tensor) -> Tensor:
    """FFT2(z), unnormalised, of maps (N, C, H, W): columns 0 .. W // 2, the others are their mirror image."""
    spectrum: Tensor = torch.fft.rfft2(maps.float() if maps.dtype != torch.float64 else maps)
    return spectrum


def log_amplitude(spectrum: Tensor) -> Tensor:
    """ln(|FFT2(z)| + 1e-6), before any averaging."""
    # By the parts of the complex numbers: three times as fast as their abs() on a CPU.
    return (spectrum.real.square() + spectrum.imag.square()).sqrt_().add_(FLOOR).log_()


def diagonal(spectrum: Tensor, width: int) -> Tensor:
    """ln(|FFT2(z)| + 1e-6) along the half diagonal.

    Where the sides differ the diagonal is taken at equal physical frequency, by linear interpolation along the longer
    side.

    Args:
        spectrum: (N, C, H, W // 2 + 1), as `half_spectrum`.
        width: W.

    Returns:
        (N, C, bins), bins as in `diagonal_frequencies`.
    """
    height = spectrum.shape[-2]
    device = spectrum.device
    bins = (min(height, width) + 1) // 2
    index = torch.arange(bins, device=device)
    if height == width:
        return log_amplitude(spectrum[..., index, index])
    longer, shorter = max(height, width), min(height, width)
    place = index.to(spectrum.real.dtype) * longer / shorter
    left = place.floor().long()
    right = (left + 1).clamp_max(longer // 2)
    rows, columns = (index, left) if width > height else (left, index)
    beside = (index, right) if width > height else (right, index)
    return torch.lerp(log_amplitude(spectrum[..., rows, columns]), log_amplitude(spectrum[..., *beside]), place - left)


def diagonal_alone(maps: Tensor) -> Tensor:
    """The same without the rest of the spectrum, of square maps, small ones in half the time on a CPU.

    F(k, k) = sum_s exp(-2 pi i k s / n) D_s, where D_s is the sum over the positions with y + x = s modulo n.
    """
    height, width = maps.shape[-2:]
    if height != width:
        return diagonal(half_spectrum(maps), width)
    maps = maps.float() if maps.dtype != torch.float64 else maps
    level = maps.mean(dim=(-2, -1), keepdim=True)  # frequency zero alone has it, the others would drown in it
    maps = maps - level
    twice = torch.cat([maps, maps], dim=-1).contiguous()  # (N, C, y, 2 n): row y, from place n - y on, is x = s - y
    image, channel, row, _ = twice.stride()
    shifted = twice.as_strided((*maps.shape[:2], width, width), (image, channel, row - 1, 1), width)
    sums = shifted.sum(dim=-2)  # (N, C, s)
    place = torch.arange(width, device=maps.device)
    steps = place[:, None] * place[: (width + 1) // 2] % width  # (s, bin)
    angle = steps.double() * (2 * torch.pi / width)
    waves = torch.cat([angle.cos(), angle.sin()], dim=1).to(maps.dtype)
    real, imaginary = (sums @ waves).chunk(2, dim=-1)
    real[..., :1] += height * width * level[..., 0]
    return (real.square() + imaginary.square()).sqrt_().add_(FLOOR).log_()


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """DeltaLogA(f) = A(f, f) - A(0, 0), mean over channels, (N, bins) float64."""
    found = diagonal_alone(maps)
    return (found - found[..., :1]).mean(dim=1, dtype=torch.float64)


def whole(half: np.ndarray, width: int) -> np.ndarray:
    """A spectrum of real maps (..., H, W // 2 + 1) with all its columns, zero frequency in the centre, (..., H, W)."""
    height = half.shape[-2]
    rows, columns = np.indices((height, width)) - np.array([height // 2, width // 2])[:, None, None]
    found: np.ndarray = half[..., np.where(columns < 0, -rows, rows) % height, np.abs(columns)]
    return found

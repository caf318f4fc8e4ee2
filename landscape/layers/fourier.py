"""Log amplitudes of the Fourier spectra of feature maps, and along their half diagonal (Park & Kim 2022, Fig. 2)."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.matrix_products import matmul

FLOOR = 1e-6  # added to amplitudes before the logarithm
WAVES = 48  # positions a side: beyond, a transform costs less than a product with every wave


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
    if spectrum.device.type != "cpu":
        return spectrum.abs().add_(FLOOR).log_()
    amplitude = np.abs(spectrum.numpy())  # on a CPU several times as fast as torch's abs and log
    amplitude += FLOOR
    return torch.from_numpy(np.log(amplitude, out=amplitude))


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
    """The same without the rest of the spectrum, of square maps up to `WAVES` wide in less than half the time.

    F(k, k) = sum_{y, x} exp(-2 pi i k (y + x) / n) z(y, x): a product with one matrix of waves for all maps.
    """
    height, width = maps.shape[-2:]
    if height != width or width > WAVES:
        return diagonal(half_spectrum(maps), width)
    maps = maps.float() if maps.dtype != torch.float64 else maps
    level = maps.mean(dim=(-2, -1), keepdim=True)  # frequency zero alone has it, the others would drown in it
    varying = (maps - level).flatten(0, 1).flatten(1)
    found = matmul(varying, _waves(width, maps.device, maps.dtype)).reshape(*maps.shape[:2], -1)
    real, imaginary = found.chunk(2, dim=-1)
    real[..., :1] = height * width * level[..., 0]
    return log_amplitude(torch.complex(real, imaginary))


@functools.lru_cache(maxsize=8)
def _waves(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the half diagonal's frequencies at every position, (n n, 2 bins)."""
    place = torch.arange(width, device=device)
    sums = (place[:, None] + place).flatten()
    angle = (sums[:, None] * place[: (width + 1) // 2] % width).double() * (2 * torch.pi / width)
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype)


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

"""Fourier transforms of maps: log amplitudes, all or along the half diagonal, and noise of one frequency band.

Park & Kim 2022, Fig. 2. Frequencies are in units of pi.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from landscape.products.matrix_products import matmul

FLOOR = 1e-6  # added to amplitudes before the logarithm
LARGEST_PRODUCT = 48  # positions per side: on larger maps the FFT is faster than a matrix product
ROUNDING = 1e-9  # of sums of decimal fractions: a frequency on the edge of a ring is inside


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
    """FFT2(z), unnormalised, of maps (N, C, H, W): columns 0 .. W // 2, the others being their mirror image."""
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
    """ln(|FFT2(z)| + 1e-6) at the `diagonal_frequencies`, (N, C, bins), from the half spectrum (N, C, H, W // 2 + 1).

    Of unequal sides, the diagonal at equal physical frequency, by linear interpolation along the longer one.
    """
    height = spectrum.shape[-2]
    shorter, longer = sorted((height, width))
    index = torch.arange((shorter + 1) // 2, device=spectrum.device)
    if height == width:
        return log_amplitude(spectrum[..., index, index])
    exact = index.to(spectrum.real.dtype) * longer / shorter
    left = exact.floor().long()
    right = (left + 1).clamp_max(longer // 2)
    rows, columns = (index, left) if width > height else (left, index)
    next_to = (index, right) if width > height else (right, index)
    return torch.lerp(log_amplitude(spectrum[..., rows, columns]), log_amplitude(spectrum[..., *next_to]), exact - left)


def by_product(height: int, width: int) -> bool:
    """Whether `diagonal_of_varying` takes such maps: square and small ones."""
    return height == width <= LARGEST_PRODUCT


def diagonal_of_varying(level: Tensor, varying: Tensor) -> Tensor:
    """`diagonal` of square maps of means `level`, (N, C), without their whole spectrum.

    `varying`: the maps less a constant each, (N, C, n, n). Only frequency zero contains the mean; to the other
    frequencies a large one would add rounding errors. F(k, k) = sum_{y, x} exp(-2 pi i k (y + x) / n) z(y, x): one
    matrix product for all maps, in less than half the time of the FFT.
    """
    width = varying.shape[-1]
    rows = varying.flatten(0, 1).flatten(1)
    product = matmul(rows, _waves(width, rows.device, rows.dtype)).reshape(*level.shape, -1)
    real, imaginary = product.chunk(2, dim=-1)
    real[..., 0] = width**2 * level
    return log_amplitude(torch.complex(real, imaginary))


@functools.lru_cache(maxsize=8)
def _waves(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of the half diagonal's frequencies at every position, (n * n, 2 * bins)."""
    index = torch.arange(width, device=device)
    sums = (index[:, None] + index).flatten()
    angle = (sums[:, None] * index[: (width + 1) // 2] % width).double() * (2 * torch.pi / width)
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(dtype)


def full_spectrum(half: np.ndarray, width: int) -> np.ndarray:
    """All columns of a half spectrum (..., H, W // 2 + 1) of real maps, zero frequency in the centre, (..., H, W)."""
    height = half.shape[-2]
    rows, columns = np.indices((height, width)) - np.array([height // 2, width // 2])[:, None, None]
    full: np.ndarray = half[..., np.where(columns < 0, -rows, rows) % height, np.abs(columns)]
    return full


def ring(height: int, width: int, low: float, high: float) -> np.ndarray:
    """The frequencies with low <= max(|fx|, |fy|) <= high, (H, W) bool in the order of the FFT.

    Symmetric about zero frequency, so that a real signal stays real.
    """
    rows, columns = (2 * np.abs(np.fft.fftfreq(n)) for n in (height, width))
    radius = np.maximum(rows[:, None], columns[None, :])
    return np.asarray((radius >= low - ROUNDING) & (radius <= high + ROUNDING))


def published_ring(height: int, width: int, low: float, high: float) -> np.ndarray:
    """The ring of Park & Kim's code, (H, W) in the order of the FFT.

    The square of 2 floor(n high / 2) frequencies per side without that of `low`, which has one frequency more on the
    negative side than on the positive. The code takes the real part of the filtered noise. That is a symmetric filter:
    half as much (0.5) where only one of two opposite frequencies passes.
    """

    def square(edge: float) -> np.ndarray:
        inside = np.zeros((height, width))
        sides = [(n, min(2 * int(max(edge, 0.0) * n / 2 + ROUNDING), n)) for n in (height, width)]
        rows, columns = (slice(n // 2 - k // 2, n // 2 - k // 2 + k) for n, k in sides)
        inside[rows, columns] = 1.0
        return inside

    passed = np.fft.ifftshift(square(high) - square(low))
    opposite = np.roll(passed[::-1, ::-1], 1, axis=(0, 1))
    return np.asarray((passed + opposite) / 2)


def band_pass(spectrum: Tensor, mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Re IFFT2(FFT2(x) M) from `torch.fft.rfft2(x)`, (..., H, W // 2 + 1), for a symmetric mask M, (H, W)."""
    filtered: Tensor = torch.fft.irfft2(spectrum * mask[:, : size[1] // 2 + 1], s=size)
    return filtered


def signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Independent random signs, float32: sign(N(0, 1)).

    From the raw stream of a bit generator, which is the same for every version of NumPy and on every platform.
    """
    count = int(np.prod(shape))
    words = np.random.PCG64(seed).random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), count=count).astype(np.float32)
    return torch.from_numpy(2 * bits - 1).reshape(shape)

"""Rings of frequencies against the Fourier transform, and the signs that noise is made of."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.layers.fourier import band_pass, published_ring, ring, signs

SIZES = [(8, 8), (9, 9), (12, 7), (5, 16), (1, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_is_where_the_larger_frequency_lies_in_the_band(size: tuple[int, int]) -> None:
    mask = ring(*size, 0.2, 0.6)
    for row in range(size[0]):
        for column in range(size[1]):
            frequencies = [min(k, n - k) * 2 / n for k, n in zip((row, column), size, strict=True)]
            assert mask[row, column] == (0.2 - 1e-12 <= max(frequencies) <= 0.6 + 1e-12)


def test_the_edges_of_a_band_belong_to_it_despite_rounding() -> None:
    mask = ring(20, 20, 0.3 - 0.1, 0.3 + 0.1)  # 0.19999999999999998 and 0.4
    assert np.flatnonzero(mask[0]).tolist() == [2, 3, 4, 16, 17, 18]
    assert ring(20, 20, 0.8 - 0.1, 0.8 + 0.1)[0].nonzero()[0].tolist() == [7, 8, 9, 11, 12, 13]


@pytest.mark.parametrize("size", SIZES)
def test_band_passed_maps_have_only_the_frequencies_of_the_ring(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = ring(*size, 0.3, 0.7)
    found = band_pass(torch.fft.rfft2(x), torch.from_numpy(mask), size)
    assert found.shape == x.shape
    spectrum, own = np.fft.fft2(found.numpy()), np.fft.fft2(x.numpy())
    np.testing.assert_allclose(spectrum[..., ~mask], 0, atol=1e-12)
    np.testing.assert_allclose(spectrum[..., mask], own[..., mask], atol=1e-12)
    np.testing.assert_allclose(found, np.fft.ifft2(own * mask).real, atol=1e-12)


def test_rings_of_all_frequencies_pass_everything() -> None:
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ring(7, 6, 0, 1).all()
    torch.testing.assert_close(band_pass(torch.fft.rfft2(x), torch.ones(7, 6), (7, 6)), x)


def test_signs_are_balanced_independent_and_of_their_seed() -> None:
    one, other = (signs((3, 64, 64), seed) for seed in (1, 2))
    assert one.unique().tolist() == [-1.0, 1.0]
    assert torch.equal(one, signs((3, 64, 64), 1))
    error = one.numel() ** -0.5
    for mean in (one.mean(), (one * other).mean(), (one[:, 1:] * one[:, :-1]).mean()):
        assert abs(mean.item()) < 4 * error
    assert torch.equal(signs((3, 5), 1).flatten(), one.flatten()[:15])


def test_the_stream_of_signs_is_fixed() -> None:
    assert signs((12,), 0).tolist() == [-1, 1, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1]


@pytest.mark.parametrize("size", [(8, 8), (12, 12), (9, 9), (8, 12)])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.4), (-0.1, 0.1), (0.0, 0.3), (0.7, 1.1)])
def test_the_published_ring_is_that_of_squares_padded_to_the_centre(
    size: tuple[int, int], low: float, high: float
) -> None:
    """The real part of noise filtered by squares of an even side, which are not symmetric about zero frequency."""

    def square(edge: float) -> Tensor:
        sides = [max(0, min(int(edge * n / 2 + 1e-9) * 2, n)) for n in size]
        before = [n // 2 - k // 2 for n, k in zip(size, sides, strict=True)]
        after = [n - k - b for n, k, b in zip(size, sides, before, strict=True)]
        return F.pad(torch.ones(sides), (before[1], after[1], before[0], after[0]))

    x = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1)) * (square(high) - square(low))
    expected = torch.fft.ifft2(torch.fft.ifftshift(centred, dim=(-2, -1))).real
    mask = published_ring(*size, low, high)
    torch.testing.assert_close(band_pass(torch.fft.rfft2(x), torch.from_numpy(mask), size), expected)
    assert set(np.unique(mask)) <= {0.0, 0.5, 1.0}

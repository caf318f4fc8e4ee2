"""Fourier analysis of feature maps against closed forms and numpy's full transform."""

import numpy as np
import pytest
import torch
from analytic import passage, run_probe
from torch import Tensor

from landscape.discovery import layer as layers
from landscape.layers import forward_hooks
from landscape.layers.forward_hooks import map_parts
from landscape.layers.fourier import (
    by_product,
    diagonal,
    diagonal_frequencies,
    diagonal_of_varying,
    frequencies,
    half_spectrum,
)
from landscape.options import OptionError
from landscape.probes.fourier import Fourier

WHITE = np.log(2) / 2  # E ln|complex normal| - E ln|real normal| of one variance: zero frequency alone is real


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonal_only(maps: Tensor) -> Tensor:
    """Log amplitudes of the half diagonal, as the probe computes them without the whole spectrum."""
    if not by_product(*maps.shape[-2:]):
        return diagonal(half_spectrum(maps), maps.shape[-1])
    return torch.cat([diagonal_of_varying(part.level, part.varying) for part in map_parts(maps)])


def relative_log_amplitude(maps: Tensor) -> Tensor:
    """DeltaLogA(f) = A(f, f) - A(0, 0), mean over channels, (N, bins) float64."""
    amplitude = diagonal_only(maps)
    return (amplitude - amplitude[..., :1]).mean(dim=1, dtype=torch.float64)


def _reference(maps: Tensor) -> np.ndarray:
    """By definition: full transform, logarithm, shift, half diagonal from the centre, own zero frequency; (N, bins)."""
    amplitude = np.log(np.abs(np.fft.fftshift(np.fft.fft2(maps.numpy()), axes=(-2, -1))) + 1e-6)
    height, width = amplitude.shape[-2:]
    if height > width:
        return _reference(maps.transpose(-1, -2))
    rows = np.arange((height + 1) // 2)
    diagonal = np.empty((*amplitude.shape[:2], len(rows)))
    for row in rows:
        line = amplitude[:, :, height // 2 + row, :]  # at the row's frequency, over the columns'
        frequencies = np.arange(width // 2 + 1) / width
        columns = line.take(width // 2 + np.arange(len(frequencies)), axis=2, mode="wrap")  # -1/2 is 1/2 as well
        diagonal[:, :, row] = [[np.interp(row / height, frequencies, values) for values in image] for image in columns]
    return (diagonal - diagonal[:, :, :1]).mean(axis=1)


@pytest.mark.parametrize(
    ("side", "last"), [(56, 0.964), (14, 0.857), (4, 0.5), (7, 6 / 7), (3, 2 / 3), (2, 0.0), (1, 0.0)]
)
def test_the_last_frequency_is_the_true_one(side: int, last: float) -> None:
    frequencies = diagonal_frequencies(side, side)
    assert frequencies[0] == 0.0
    assert frequencies[-1] == pytest.approx(last, abs=5e-4)
    np.testing.assert_allclose(frequencies / 2, np.abs(np.fft.fftfreq(side))[: len(frequencies)], atol=1e-15)
    np.testing.assert_array_equal(frequencies, diagonal_frequencies(side, side + 5))


@pytest.mark.parametrize("shape", [(8, 8), (7, 7), (6, 10), (10, 6), (5, 8), (9, 4), (7, 12), (2, 3), (1, 6), (1, 1)])
def test_amplitudes_are_those_of_the_full_shifted_transform(shape: tuple[int, int]) -> None:
    maps = _noise(3, 2, *shape)
    np.testing.assert_allclose(relative_log_amplitude(maps), _reference(maps), rtol=1e-10, atol=1e-12)


def test_maps_are_transformed_in_single_precision_without_loss_around_a_large_mean() -> None:
    maps = _noise(3, 2, 8, 8)
    torch.testing.assert_close(relative_log_amplitude(maps.float()), relative_log_amplitude(maps), rtol=0, atol=1e-5)
    half = maps.bfloat16()
    torch.testing.assert_close(relative_log_amplitude(half), relative_log_amplitude(half.float()))
    maps = (100 + 0.01 * _noise(4, 3, 32, 32)).float()
    np.testing.assert_allclose(diagonal_only(maps), diagonal(half_spectrum(maps.double()), 32), atol=1e-4)


def test_white_noise_is_flat() -> None:
    found = relative_log_amplitude(_noise(20000, 1, 8, 8))
    error = found.std(dim=0) / 20000**0.5
    assert (found.mean(dim=0)[1:] - WHITE).abs().le(4 * error[1:]).all()


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_box_blur_changes_white_noise_by_its_transfer_function(width: int) -> None:
    maps = _noise(4, 3, 16, 16)
    blurred = torch.stack([maps.roll((i, j), (2, 3)) for i in range(width) for j in range(width)]).mean(dim=0)
    omega = np.pi * diagonal_frequencies(16, 16)[1:]
    transfer = np.sin(width * omega / 2) / (width * np.sin(omega / 2))  # along one axis; the diagonal has its square
    change = relative_log_amplitude(blurred) - relative_log_amplitude(maps)
    expected = np.broadcast_to(2 * np.log(np.abs(transfer)), (4, 7))
    np.testing.assert_allclose(change[:, 1:], expected, atol=1e-3)  # up to the 1e-6 inside the logarithm


def test_a_constant_map_has_only_zero_frequency_and_the_scale_of_a_map_does_not_matter() -> None:
    found = relative_log_amplitude(torch.full((2, 3, 8, 8), 5.0, dtype=torch.float64))
    np.testing.assert_allclose(found, np.broadcast_to([0.0, *[np.log(1e-6 / (64 * 5))] * 3], (2, 4)), atol=1e-6)
    single = torch.full((1, 1, 15, 15), 1000.0)
    np.testing.assert_allclose(diagonal_only(single)[..., 1:], np.log(1e-6), atol=1e-3)
    maps = _noise(2, 3, 8, 8)
    torch.testing.assert_close(relative_log_amplitude(1e3 * maps), relative_log_amplitude(maps), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 8), (6, 10)])
def test_every_layer_is_measured_on_its_own_grid_from_its_own_zero_frequency(shape: tuple[int, int]) -> None:
    maps = _noise(7, 3, *shape)
    found = run_probe(Fourier(layers=("maps", "pooled", "tokens")), passage(maps))
    assert found["name"].tolist() == ["maps", "pooled", "tokens"]
    whole, small = _reference(maps), _reference(torch.nn.functional.avg_pool2d(maps, 2))
    bins = small.shape[1]
    for row, expected in ((0, whole), (2, whole)):  # foreign tokens before the grid leave no trace
        np.testing.assert_allclose(found["delta_log_amplitude"][row], expected.mean(axis=0), atol=1e-9)
        error = expected.std(axis=0, ddof=1) / 7**0.5
        np.testing.assert_allclose(found["delta_log_amplitude_se"][row], error, atol=1e-9)
    np.testing.assert_allclose(found["delta_log_amplitude"][1, :bins], small.mean(axis=0), atol=1e-9)
    assert np.isnan(found["delta_log_amplitude"][1, bins:]).all()
    assert np.isnan(found["frequency"][1, bins:]).all()
    np.testing.assert_allclose(found["high_frequency"][:2], [whole.mean(axis=0)[-1], small.mean(axis=0)[-1]])


def test_a_common_frequency_is_one_of_the_image_and_not_of_a_layers_grid() -> None:
    found = run_probe(Fourier(layers=("maps", "pooled")), passage(_noise(7, 3, 16, 16)))
    np.testing.assert_allclose(found["common_frequency"], np.arange(4) / 8)  # pi per pixel, as far as 8 x 8 reaches
    np.testing.assert_allclose(found["scale"], [1.0, 0.5])
    np.testing.assert_allclose(found["delta_log_amplitude_common"], found["delta_log_amplitude"][:, :4])


def test_park2022_frequencies_call_the_last_bin_pi_and_change_no_value() -> None:
    subject = passage(_noise(7, 3, 8, 8))
    true, published = (run_probe(Fourier(layers=("maps",), frequencies=f), subject) for f in ("true", "park2022"))
    np.testing.assert_allclose(true["frequency"], [[0, 0.25, 0.5, 0.75]])
    np.testing.assert_allclose(published["frequency"], [[0, 1 / 3, 2 / 3, 1]])
    np.testing.assert_array_equal(published["delta_log_amplitude"], true["delta_log_amplitude"])
    with pytest.raises(OptionError, match="--frequencies"):
        Fourier(frequencies="nyquist")  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_sums_add_up_whatever_the_batch_size(batch_size: int) -> None:
    probe, maps = Fourier(layers=("maps", "tokens")), _noise(11, 2, 6, 6)
    found, other = run_probe(probe, passage(maps, batch_size=batch_size)), run_probe(probe, passage(maps, batch_size=4))
    for name in ("delta_log_amplitude", "delta_log_amplitude_se", "high_frequency", "high_frequency_se"):
        np.testing.assert_allclose(found[name], other[name], rtol=1e-9, atol=1e-12)
    assert found["samples"].sum() == 11


def test_a_half_finished_result_is_the_mean_of_the_finished_images() -> None:
    probe, maps = Fourier(layers=("maps",)), _noise(11, 2, 6, 6)
    part, first = run_probe(probe, passage(maps), units=1), run_probe(probe, passage(maps[:5]))
    np.testing.assert_allclose(part["delta_log_amplitude"], first["delta_log_amplitude"])
    assert np.isnan(run_probe(probe, passage(maps), units=0)["delta_log_amplitude"]).all()


def test_one_image_has_no_standard_error_and_one_position_no_high_frequency() -> None:
    found = run_probe(Fourier(layers=("maps", "pooled")), passage(_noise(1, 2, 2, 2)))
    assert np.isnan(found["delta_log_amplitude_se"]).all()
    assert np.isnan(found["high_frequency"]).all()
    np.testing.assert_allclose(found["delta_log_amplitude"], 0.0)


@pytest.mark.parametrize("shape", [(8, 8), (7, 7), (6, 10), (9, 4), (5, 8)])
def test_the_spectrum_of_all_frequencies_is_that_of_numpy(shape: tuple[int, int]) -> None:
    maps = _noise(7, 3, *shape)
    found = run_probe(Fourier(layers=("maps", "pooled", "tokens")), passage(maps))
    for row, layer in enumerate((maps, torch.nn.functional.avg_pool2d(maps, 2), maps)):
        height, width = layer.shape[-2:]
        amplitude = np.log(np.abs(np.fft.fftshift(np.fft.fft2(layer.numpy()), axes=(-2, -1))) + 1e-6).mean(axis=(0, 1))
        expected = amplitude - amplitude[height // 2, width // 2]
        np.testing.assert_allclose(found["spectrum"][row, :height, :width], expected, atol=1e-9)
        assert np.isnan(found["spectrum"][row, height:]).all()
        assert np.isnan(found["spectrum"][row, :, width:]).all()
        np.testing.assert_allclose(found["row_frequency"][row, :height], frequencies(height))
        assert found["column_frequency"][row, width // 2] == 0.0


def test_the_diagonal_of_the_spectrum_is_the_diagonal_and_may_be_measured_alone() -> None:
    subject, middle = passage(_noise(7, 3, 8, 8)), np.arange(4) + 4
    full, alone = (run_probe(Fourier(layers=("maps",), spectrum=s), subject) for s in ("full", "diagonal"))  # type: ignore[arg-type]
    np.testing.assert_allclose(full["spectrum"][0, middle, middle], full["delta_log_amplitude"][0], atol=1e-12)
    np.testing.assert_allclose(full["delta_log_amplitude"], alone["delta_log_amplitude"], atol=1e-12)
    assert "spectrum" not in alone
    with pytest.raises(OptionError, match="--spectrum"):
        Fourier(spectrum="half")  # type: ignore[arg-type]


def test_chunks_of_a_batch_give_the_result_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = passage(_noise(7, 3, 8, 8))
    probe = Fourier(layers=("maps", "tokens"))
    whole = run_probe(probe, subject)
    monkeypatch.setattr(layers, "CPU_CHUNK", 2 * 3 * 64)
    monkeypatch.setattr(forward_hooks, "PART", 2 * 3 * 64)
    for name, values in run_probe(probe, subject).items():
        if "delta" in name or name == "spectrum":
            np.testing.assert_allclose(values, whole[name], rtol=1e-12, atol=1e-12)

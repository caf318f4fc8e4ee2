"""Noise of one band against its definition in NumPy, and what it does not change."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import batches_of, convolution_net, rebatched, run_probe
from torch import Tensor, nn

import landscape
from landscape.layers.fourier import band_pass, published_ring, ring, signs
from landscape.options import OptionError
from landscape.plots import drawing
from landscape.probe import derived_seed
from landscape.probes.noise import Noise
from landscape.subject.loading.identity import digest
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject


class Kept(nn.Module):
    """Keeps its inputs; logits from their mean, range and corner."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([3.0, 0.5, 1.0], dtype=torch.float64))
        self.inputs: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.inputs.append(images)
        flat = images.flatten(1)
        return self.scale * torch.stack([flat.mean(1), flat.std(1), flat[:, 0]], dim=1)


def _subject(shape: tuple[int, ...] = (3, 12, 12), sizes: tuple[int, ...] = (4, 3)) -> Subject:
    return Subject(Kept().eval(), batches_of(shape, sizes, 3))


def _noise(subject: Subject, probe: Noise) -> np.ndarray:
    """What was added to each image in each band, (band, N, C, H, W)."""
    units, model = list(probe.plan(subject).units()), subject.model
    model.inputs.clear()
    for unit in units:
        probe.measure(subject, unit)
    clean = [subject.batches[unit.index[0]][0] for unit in units]
    added = [(seen - x).numpy() for seen, x in zip(model.inputs, clean, strict=True)]
    bands = len(units) // len(subject.batches)
    return np.stack([np.concatenate(added[band::bands]) for band in range(bands)])


def _delta(shape: tuple[int, ...], image: int, seed: int = 0) -> np.ndarray:
    """The signs of one image, bit by bit."""
    count = int(np.prod(shape))
    words = np.random.PCG64(derived_seed(seed, image)).random_raw(-(-count // 64))
    bits = [int(word) >> shift & 1 for word in words for shift in _order()]
    return np.array(bits[:count], dtype=float).reshape(shape) * 2 - 1


def _order() -> list[int]:
    """Little-endian bytes, in each the highest bit first."""
    return [8 * byte + bit for byte in range(8) for bit in range(7, -1, -1)]


@pytest.mark.parametrize("shape", [(3, 12, 12), (1, 9, 9), (4, 10, 15)])
def test_the_noise_equals_its_definition(shape: tuple[int, ...]) -> None:
    subject = _subject(shape)
    found = _noise(subject, Noise(eps="0.7"))
    frequencies = [np.minimum(np.arange(n), n - np.arange(n)) * 2 / n for n in shape[1:]]
    radius = np.maximum.outer(*frequencies)
    for band in range(9):
        low, high = band / 10, (band + 2) / 10
        mask = (radius > low - 1e-9) & (radius < high + 1e-9)
        for image in range(7):
            expected = np.fft.ifft2(np.fft.fft2(0.7 * _delta(shape, image)) * mask)
            np.testing.assert_allclose(expected.imag, 0, atol=1e-12)
            np.testing.assert_allclose(found[band, image], expected.real, atol=1e-12)


@pytest.mark.parametrize("size", [(12, 12), (9, 14)])
def test_a_band_has_only_its_frequencies_and_with_equal_energy_one_norm(size: tuple[int, int]) -> None:
    subject = _subject((2, *size))
    plain, equal = (_noise(subject, Noise(equal_energy=flag)) for flag in (False, True))
    for noise in (plain, equal):
        power = np.abs(np.fft.fft2(noise)) ** 2
        radius = np.maximum.outer(*[2 * np.abs(np.fft.fftfreq(n)) for n in size])
        for band in range(9):
            outside = (radius < band / 10 - 1e-9) | (radius > (band + 2) / 10 + 1e-9)
            assert power[band][..., outside].sum() < 1e-20 * power[band].sum()
    norms = np.sqrt((equal**2).sum(axis=(2, 3, 4)))
    counts = [((radius >= band / 10 - 1e-9) & (radius <= (band + 2) / 10 + 1e-9)).sum() for band in range(9)]
    np.testing.assert_allclose(norms, 0.7 * np.sqrt(2 * np.mean(counts)), rtol=1e-12)
    for band in range(9):  # each image's noise keeps its form
        cosine = (plain[band] * equal[band]).sum(axis=(1, 2, 3)) / norms[band]
        np.testing.assert_allclose(cosine, np.sqrt((plain[band] ** 2).sum(axis=(1, 2, 3))), rtol=1e-12)


def test_drops_are_paired_differences_with_their_errors() -> None:
    subject, probe = convolution_net(sizes=(6, 5)), Noise(bands="0.2,0.9", eps="3")
    found = run_probe(probe, subject)
    loss, right = (values.numpy() for values in per_sample(subject))
    assert found["facts"]["intact_accuracy"] == pytest.approx(right.mean())
    for band, (low, high) in enumerate([(0.1, 0.3), (0.8, 1.0)]):
        noisy, image = [], 0
        for inputs, targets in subject.batches:
            radius = np.maximum.outer(*[2 * np.abs(np.fft.fftfreq(6))] * 2)
            mask = (radius > low - 1e-9) & (radius < high + 1e-9)
            deltas = np.stack([3 * _delta((3, 6, 6), image + row) for row in range(len(inputs))])
            image += len(inputs)
            noisy.append((inputs + torch.from_numpy(np.fft.ifft2(np.fft.fft2(deltas) * mask).real), targets))
        if low == 0.1:  # 6 pixels: no frequency between 0.1 and 0.3 pi
            assert np.isnan([found[name][band] for name in ("accuracy_drop", "loss_increase", "noise_rms")]).all()
            continue
        after, still = (values.numpy() for values in per_sample(replace(subject, batches=noisy)))
        for name, difference in (("loss_increase", after - loss), ("accuracy_drop", right - still)):
            assert found[name][band] == pytest.approx(difference.mean(), rel=1e-10)
            assert found[f"{name}_se"][band] == pytest.approx(difference.std(ddof=1) / 11**0.5, rel=1e-9)


def test_rings_without_a_frequency_are_nan_done_and_listed() -> None:
    found = run_probe(Noise(), _subject((1, 4, 4)))
    empty = found["frequencies"] == 0
    assert empty.tolist() == [False, True, True, False, False, False, True, True, False]  # 0, 0.5 and 1 pi
    assert found["facts"]["empty_bands"] == "0.2, 0.3, 0.7, 0.8"
    np.testing.assert_array_equal(np.isnan(found["accuracy_drop"]), empty)
    assert (found["done"] == 1).all()
    assert run_probe(Noise(), _subject((1, 20, 20)))["facts"]["empty_bands"] == ""


def test_the_noise_does_not_depend_on_the_batch_size_nor_on_other_bands() -> None:
    subject = convolution_net(sizes=(6, 5))
    found = run_probe(Noise(bands="0.4,0.6,0.9", eps="2"), subject)
    for size in (1, 4, 11):
        other = run_probe(Noise(bands="0.9", eps="2"), replace(subject, batches=rebatched(subject.batches, size)))
        for name in ("accuracy_drop", "accuracy_drop_se", "loss_increase", "loss_increase_se", "noise_rms"):
            np.testing.assert_allclose(other[name][0], found[name][2], rtol=1e-9)


def test_several_sizes_are_separate_studies_with_the_same_signs() -> None:
    small, large = Noise(eps="0.35,0.7").variants()
    assert (small.eps, large.eps) == ("0.35", "0.7")
    subject = _subject()
    np.testing.assert_allclose(2 * _noise(subject, small), _noise(subject, large), rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="means 2 results"):
        run_probe(Noise(eps="0.35,0.7"), subject)


def test_other_inputs_than_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"noise needs images \(N, C, H, W\)"):
        Noise().plan(Subject(nn.Linear(4, 3).double(), batches_of((4,), (5,), 3)))


@pytest.mark.slow
def test_pictures_hold_the_masks_and_the_noise_that_the_network_was_given(tmp_path: Path) -> None:
    subject, probe = _subject(), Noise(bands="0.2,0.7", eps="0.1", pictures=5)
    plain = run_probe(replace(probe, pictures=0), subject)
    found = run_probe(probe, subject)
    np.testing.assert_array_equal(found["loss_increase"], plain["loss_increase"])
    added, inputs = _noise(subject, probe), torch.cat([batch[0] for batch in subject.batches]).numpy()
    for k in range(5):
        low, high = inputs[k].min(), inputs[k].max()
        np.testing.assert_allclose(found["image"][k], (inputs[k] - low) / (high - low), atol=1e-6)
        expected = ((inputs[k] + added[:, k] - low) / (high - low)).clip(0, 1)
        np.testing.assert_allclose(found["noisy_image"][:, k], expected, atol=1e-6)
    np.testing.assert_array_equal(found["mask"].sum(axis=(1, 2)), found["frequencies"])
    assert found["mask"][0, 6, 6] == 0  # zero frequency is in the centre and not in this band
    assert found["mask"][0, 6, 7] == 1
    probes = (probe, replace(probe, pictures=0), replace(probe, pictures=1))
    assert len({digest(one, subject) for one in probes}) == 3
    data = landscape.measure("noise", subject, out=tmp_path / "r.h5", quiet=True, bands="0.2,0.7", pictures=2)
    assert dict(data["noisy_image"].sizes) == {"band": 2, "picture": 2, "channel": 3, "row": 12, "column": 12}
    assert drawing.draw(tmp_path / "r.h5", tmp_path / "figures")[-1].name == "noise_pictures.png"
    with pytest.raises(ValueError, match=r"9 pictures were asked for, the data have 7 samples; ask for fewer"):
        Noise(pictures=9).plan(subject)


def test_noise_of_the_published_ring_equals_its_definition_and_is_another_measurement() -> None:
    shape = (3, 12, 12)
    subject = _subject(shape)
    found = _noise(subject, Noise(bands="0.5", ring="park2022"))
    mask = np.zeros((12, 12))
    mask[3:9, 3:9] = 1  # 2 floor(12 x 0.6 / 2) = 6 frequencies per side, -3 to 2
    mask[4:8, 4:8] = 0  # without 2 floor(12 x 0.4 / 2) = 4, -2 to 1
    for image in range(7):
        expected = np.fft.ifft2(np.fft.fft2(0.7 * _delta(shape, image)) * np.fft.ifftshift(mask)).real
        np.testing.assert_allclose(found[0, image], expected, atol=1e-12)
    equal = _noise(subject, Noise(bands="0.3,0.5", ring="park2022", equal_energy=True))
    norms = np.sqrt((equal**2).sum(axis=(2, 3, 4)))
    np.testing.assert_allclose(norms, norms[0, 0])
    plain, published = (digest(Noise(ring=ring), subject) for ring in ("symmetric", "park2022"))
    assert plain != published
    with pytest.raises(OptionError, match="--ring must be"):
        Noise(ring="round")  # type: ignore[arg-type]


# --- Rings of frequencies against the Fourier transform, and the signs that noise is made of ---


SIZES = [(8, 8), (9, 9), (12, 7), (5, 16), (1, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_is_where_the_larger_frequency_lies_in_the_band(size: tuple[int, int]) -> None:
    mask = ring(*size, 0.2, 0.6)
    for row in range(size[0]):
        for column in range(size[1]):
            frequencies = [min(k, n - k) * 2 / n for k, n in zip((row, column), size, strict=True)]
            assert mask[row, column] == (0.2 - 1e-12 <= max(frequencies) <= 0.6 + 1e-12)


def test_the_edges_of_a_band_belong_to_it_despite_rounding_and_all_frequencies_pass_everything() -> None:
    mask = ring(20, 20, 0.3 - 0.1, 0.3 + 0.1)  # 0.19999999999999998 and 0.4
    assert np.flatnonzero(mask[0]).tolist() == [2, 3, 4, 16, 17, 18]
    assert ring(20, 20, 0.8 - 0.1, 0.8 + 0.1)[0].nonzero()[0].tolist() == [7, 8, 9, 11, 12, 13]
    x = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ring(7, 6, 0, 1).all()
    torch.testing.assert_close(band_pass(torch.fft.rfft2(x), torch.ones(7, 6), (7, 6)), x)


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


def test_signs_are_balanced_independent_and_fixed_by_their_seed() -> None:
    one, other = (signs((3, 64, 64), seed) for seed in (1, 2))
    assert one.unique().tolist() == [-1.0, 1.0]
    assert torch.equal(one, signs((3, 64, 64), 1))
    error = one.numel() ** -0.5
    for mean in (one.mean(), (one * other).mean(), (one[:, 1:] * one[:, :-1]).mean()):
        assert abs(mean.item()) < 4 * error
    assert torch.equal(signs((3, 5), 1).flatten(), one.flatten()[:15])
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

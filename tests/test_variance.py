"""Feature-map variance against numpy."""

import numpy as np
import pytest
import torch
from analytic import passage, run_probe
from torch import Tensor

from landscape.probes.variance import Variance

PROBE, NAMES = Variance(layers=("maps", "pooled", "tokens")), ("variance", "variance_se", "variance_normalised")


def _maps(*shape: int, seed: int = 0) -> Tensor:
    """Noise about a different mean and of a different size in every channel."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise * torch.arange(1, shape[1] + 1)[:, None, None] + 3.0


def _variance(maps: Tensor) -> np.ndarray:
    """Per image: unbiased over positions, mean over channels."""
    return maps.numpy().reshape(*maps.shape[:2], -1).var(axis=2, ddof=1).mean(axis=1)


@pytest.mark.parametrize("shape", [(8, 8), (6, 10)])
def test_variance_is_unbiased_over_positions_and_averaged_over_channels_and_images(shape: tuple[int, int]) -> None:
    maps = _maps(11, 3, *shape)
    found = run_probe(PROBE, passage(maps))
    for row, layer in enumerate((maps, torch.nn.functional.avg_pool2d(maps, 2), maps)):  # tokens: without their prefix
        expected = _variance(layer)
        assert found["variance"][row] == pytest.approx(expected.mean(), rel=1e-12)
        assert found["variance_se"][row] == pytest.approx(expected.std(ddof=1) / 11**0.5, rel=1e-9)
        normalised = expected.mean() / layer.square().mean().item()
        assert found["variance_normalised"][row] == pytest.approx(normalised, rel=1e-12)


def test_averaging_noise_over_two_by_two_positions_leaves_a_quarter_of_its_variance() -> None:
    found = run_probe(PROBE, passage(torch.randn(64, 4, 32, 32, generator=torch.Generator().manual_seed(0)).double()))
    assert found["variance"][1] / found["variance"][0] == pytest.approx(0.25, rel=0.02)


def test_constant_maps_do_not_vary_and_what_zeros_or_one_position_lack_is_missing() -> None:
    found = run_probe(PROBE, passage(torch.full((4, 2, 4, 4), 7.0, dtype=torch.float64)))
    for name in NAMES:
        assert found[name].tolist() == [0.0, 0.0, 0.0]
    found = run_probe(PROBE, passage(torch.zeros(4, 2, 4, 4, dtype=torch.float64)))
    assert found["variance"][:2].tolist() == [0.0, 0.0]
    assert np.isnan(found["variance_normalised"][:2]).all()
    found = run_probe(PROBE, passage(_maps(4, 2, 2, 2)))
    assert np.isnan([found[name][1] for name in NAMES]).all()
    assert np.isfinite(found["variance"][[0, 2]]).all()


def test_the_normalised_form_does_not_depend_on_the_scale_of_a_map() -> None:
    maps = _maps(6, 2, 4, 4)
    plain, scaled = (run_probe(PROBE, passage(scale * maps)) for scale in (1.0, 50.0))
    np.testing.assert_allclose(scaled["variance_normalised"], plain["variance_normalised"], rtol=1e-12)
    np.testing.assert_allclose(scaled["variance"], 2500 * plain["variance"], rtol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3, 11])
def test_sums_add_up_whatever_the_batch_size(batch_size: int) -> None:
    maps = _maps(11, 2, 6, 6)
    found, other = run_probe(PROBE, passage(maps, batch_size=batch_size)), run_probe(PROBE, passage(maps, batch_size=4))
    for name in NAMES:
        np.testing.assert_allclose(found[name], other[name], rtol=1e-9)


def test_a_half_finished_result_is_that_of_the_finished_images() -> None:
    maps = _maps(11, 2, 6, 6)
    part, first = run_probe(PROBE, passage(maps), units=1), run_probe(PROBE, passage(maps[:5]))
    np.testing.assert_allclose(part["variance"], first["variance"])
    nothing = run_probe(PROBE, passage(maps), units=0)
    assert all(np.isnan(nothing[name]).all() for name in NAMES)

"""Uncertainty of feature maps against torch, and the covariance of averaged noise in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from analytic import passage, random_batch, rebatched, run_probe
from torch import Tensor, nn

import landscape
from landscape.models.blocks import Smoothing
from landscape.probes.uncertainty import Uncertainty, _products
from landscape.subject.subject import Subject

PROBE = Uncertainty(layers=("maps", "pooled", "tokens"), reach=2)


class Averaged(nn.Module):
    """The images themselves, and their averages over 2 x 2 neighbours."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.maps = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.dirac_(self.maps.weight)
        self.smoothing = Smoothing(float("inf"), activation="none")
        self.head = nn.Linear(channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.smoothing(self.maps(images)).mean((2, 3)))
        return logits


def maps_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 1


def test_data_uncertainty_is_the_standard_deviation_over_points() -> None:
    maps = maps_of(11, 3, 8, 8)
    found = run_probe(PROBE, passage(maps))
    for row, layer in enumerate((maps, torch.nn.functional.avg_pool2d(maps, 2), maps)):
        expected = layer.numpy().reshape(11, 3, -1).std(axis=2, ddof=1).mean(axis=1)
        assert found["data_uncertainty"][row] == pytest.approx(expected.mean(), rel=1e-12)
        assert found["data_uncertainty_se"][row] == pytest.approx(expected.std(ddof=1) / 11**0.5, rel=1e-9)
    assert "model_uncertainty" not in found


def test_covariance_of_data_is_that_of_numpy_with_one_mini_batch() -> None:
    maps = maps_of(11, 3, 6, 8)
    maps += maps.roll(1, dims=3)
    found = run_probe(PROBE, passage(maps, batch_size=11))
    centred = (maps - maps.mean(dim=0)).numpy()
    products = np.einsum("nchw,nc->hw", centred, centred[:, :, 3, 4])
    window = products[1:6, 2:7] / products[3, 4]
    assert found["data_covariance"][0] == pytest.approx(window, rel=1e-10)
    near = window[[1, 3, 2, 2], [2, 2, 1, 3]].mean()
    assert found["data_neighbours"][0] == pytest.approx(near, rel=1e-10)
    assert np.isnan(found["data_covariance"][1][:, 0]).sum() == 2  # the pooled map has 3 rows
    assert found["data_covariance"][1][2, 2] == pytest.approx(1.0)


def test_products_do_not_depend_on_the_order_of_channels_in_memory() -> None:
    maps = maps_of(11, 3, 6, 8)
    tokens = maps.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    torch.testing.assert_close(_products(tokens, 2), _products(maps, 2), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_averages_of_noise_share_half_and_a_quarter_of_their_pixels() -> None:
    torch.manual_seed(0)
    batch = random_batch((4, 12, 12), 64, 3, seed=0)
    subject = Subject(Averaged(4).double().eval(), rebatched([batch], 16))
    found = run_probe(Uncertainty(layers=("maps", "smoothing"), reach=2), subject)
    kernel = np.array([0, 0.5, 1, 0.5, 0])
    for row, expected in enumerate((np.outer(kernel == 1, kernel == 1), np.outer(kernel, kernel))):
        for name in ("gaussian", "data"):
            difference, error = found[f"{name}_covariance"][row] - expected, found[f"{name}_covariance_se"][row]
            assert difference[2, 2] == pytest.approx(0.0, abs=1e-12)
            assert error[2, 2] == pytest.approx(0.0, abs=1e-6)
            outer = np.delete((difference / np.where(error > 1e-9, error, 1.0)).ravel(), 12)
            assert np.abs(outer).max() < 4.5  # standard errors
            assert 0.5 < outer.std() < 1.6
            assert found[f"{name}_neighbours"][row] == pytest.approx(0.5 * row, abs=0.06)


def test_model_uncertainty_is_the_standard_deviation_over_members() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(4, 3)).double().eval()  # fmt: skip
    images, targets = random_batch((3, 6, 6), 10, 3, seed=0)
    subject = landscape.load(model, data=(images, targets), mc_dropout=4, batch_size=5)
    assert isinstance(subject, Subject)
    found = run_probe(Uncertainty(layers=("^0$", "^1$"), reach=1), subject)
    stacked = []
    for member in range(4):
        kept: list[Tensor] = []
        handle = model[1].register_forward_hook(lambda module, args, output, kept=kept: kept.append(output.detach()))
        with subject.member(member), torch.no_grad():
            for i in range(2):
                subject.outputs(subject.batch(i)[0])
        handle.remove()
        stacked.append(torch.cat(kept))
    maps = torch.stack(stacked)
    per_image = maps.std(dim=0).mean(dim=(1, 2, 3)).numpy()
    assert found["model_uncertainty"] == pytest.approx(np.array([0.0, per_image.mean()]), rel=1e-9)
    assert found["model_uncertainty_se"][1] == pytest.approx(per_image.std(ddof=1) / 10**0.5, rel=1e-9)
    spread = maps.std(dim=(3, 4)).mean(dim=2).mean(dim=0).numpy()
    assert found["data_uncertainty"][1] == pytest.approx(spread.mean(), rel=1e-9)

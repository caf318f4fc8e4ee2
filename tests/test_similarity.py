"""Centred kernel alignment against its definition, an exhaustive average over mini-batches, and invariances."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import passage, run_probe
from measured_runs import ARGUMENTS, save
from torch import Tensor

from landscape import models
from landscape.layers.cka import centred_kernel, hsic, hsic_of_itself
from landscape.probes.similarity import Similarity
from landscape.running.run import digest
from landscape.subject.loading import load as loading

PROBE = Similarity(layers=("maps", "pooled", "tokens"))


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _hsic(one: Tensor, other: Tensor) -> float:
    """By definition (Song et al. 2012, Eq. 5)."""
    x, y = (part.flatten(1).numpy() for part in (one, other))
    k, m, n = x @ x.T, y @ y.T, len(x)
    np.fill_diagonal(k, 0.0)
    np.fill_diagonal(m, 0.0)
    ones = np.ones(n)
    middle = (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return float((np.trace(k @ m) + middle - 2 / (n - 2) * ones @ k @ m @ ones) / (n * (n - 3)))


def _kernels(*features: Tensor) -> list[Tensor]:
    return [centred_kernel(own)[None] for own in features]


def _cka(one: Tensor, other: Tensor) -> float:
    kernels = _kernels(one, other)
    both = hsic(*kernels) / (hsic_of_itself(kernels[0]) * hsic_of_itself(kernels[1])).sqrt()
    return both.item()


@pytest.mark.parametrize("samples", [4, 5, 12])
def test_hsic_is_that_of_the_definition(samples: int) -> None:
    one, other = _noise(samples, 3) + 2.0, _noise(samples, 5, seed=1)
    assert hsic(*_kernels(one, other)).item() == pytest.approx(_hsic(one, other), rel=1e-10)
    assert hsic_of_itself(*_kernels(one)).item() == pytest.approx(_hsic(one, one), rel=1e-10)


def test_the_mean_over_all_mini_batches_is_the_full_batch() -> None:
    one, other = _noise(8, 3), _noise(8, 3, seed=1)
    other[:, 0] += one[:, 0]
    parts = [_hsic(one[list(rows)], other[list(rows)]) for rows in itertools.combinations(range(8), 5)]
    assert hsic(*_kernels(one, other)).item() == pytest.approx(np.mean(parts), rel=1e-10)


def test_alignment_is_invariant_to_rotation_shift_and_scale_and_a_large_mean_costs_no_precision() -> None:
    x = _noise(12, 6)
    rotation, _ = torch.linalg.qr(_noise(6, 6, seed=1))
    assert _cka(x, 3.0 * x @ rotation + 7.0) == pytest.approx(1.0, abs=1e-12)
    x, y = _noise(16, 20).float(), _noise(16, 20, seed=1).float()
    assert _cka(x + 100.0, y) == pytest.approx(_cka(x.double(), y.double()), abs=1e-4)


def test_independent_features_are_near_zero_on_either_side() -> None:
    found = [_cka(_noise(32, 8, seed=2 * i), _noise(32, 8, seed=2 * i + 1)) for i in range(200)]
    assert abs(np.mean(found)) < 4 * np.std(found, ddof=1) / 200**0.5
    assert min(found) < 0 < max(found)


def test_every_pair_of_layers_over_mini_batches() -> None:
    maps = _noise(15, 3, 4, 4)
    found = run_probe(PROBE, passage(maps))
    layers = [maps, torch.nn.functional.avg_pool2d(maps, 2), maps]  # tokens: without their prefix
    sums = np.zeros((3, 3))
    for rows in range(0, 15, 5):
        sums += [[_hsic(one[rows : rows + 5], other[rows : rows + 5]) for other in layers] for one in layers]
    expected = sums / np.sqrt(np.outer(np.diag(sums), np.diag(sums)))
    np.testing.assert_allclose(found["cka"], expected, rtol=1e-9)
    np.testing.assert_allclose(np.diag(found["cka"]), 1.0, rtol=1e-12)
    assert found["cka"][0, 2] == pytest.approx(1.0)
    assert found["name"].tolist() == found["other_name"].tolist() == ["maps", "pooled", "tokens"]


def test_the_error_is_the_jackknife_over_mini_batches() -> None:
    maps = _noise(20, 3, 4, 4)
    found = run_probe(PROBE, passage(maps))
    rest = [torch.cat([maps[: 5 * i], maps[5 * i + 5 :]]) for i in range(4)]  # without one mini-batch
    left = [run_probe(PROBE, passage(part))["cka"] for part in rest]
    error = np.sqrt(3 / 4 * ((left - np.mean(left, axis=0)) ** 2).sum(axis=0))
    np.testing.assert_allclose(found["cka_se"], error, rtol=1e-7, atol=1e-12)
    assert np.isnan(run_probe(PROBE, passage(maps), units=1)["cka_se"]).all()


def test_a_last_mini_batch_too_small_for_an_estimate_is_left_out_and_only_such_are_an_error() -> None:
    maps = _noise(13, 3, 4, 4)
    found, whole = run_probe(PROBE, passage(maps)), run_probe(PROBE, passage(maps[:10]))
    assert np.isnan(found["hsic"][2]).all()
    np.testing.assert_array_equal(found["cka"], whole["cka"])
    np.testing.assert_array_equal(found["cka_se"], whole["cka_se"])
    with pytest.raises(ValueError, match="at least 4 images per mini-batch, got 3"):
        PROBE.plan(passage(_noise(9, 3, 4, 4), batch_size=3))
    constant = run_probe(PROBE, passage(torch.ones(10, 2, 4, 4, dtype=torch.float64)))
    assert np.isnan(constant["cka"]).all()  # a layer that does not vary has no alignment
    assert constant["cka_unmeasured"] == "maps, pooled, tokens: no difference between samples"


def test_a_network_without_maps_is_measured() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    subject = loading.Subject(model.double().eval(), [(_noise(8, 3, 2, 2), torch.zeros(8, dtype=torch.long))])
    found = run_probe(Similarity(layers=("1", "3")), subject)
    hidden = model[1](model[0](subject.batches[0][0])).detach()
    logits = model(subject.batches[0][0]).detach()
    expected = _hsic(hidden, logits) / np.sqrt(_hsic(hidden, hidden) * _hsic(logits, logits))
    assert found["cka"][0, 1] == pytest.approx(expected, rel=1e-10)


def _loaded(path: Path) -> Any:
    return loading.load(path, data="digits", samples=16, batch_size=8)


@pytest.mark.slow
def test_a_network_against_a_copy_aligns_fully_and_against_another_has_its_layers(tmp_path: Path) -> None:
    mine, same = save(tmp_path / "mine.pt", seed=0), save(tmp_path / "same.pt", seed=0, epoch=3.0)
    other = save(tmp_path / "other.pt", seed=1)
    alone = run_probe(Similarity(), _loaded(mine))
    again = run_probe(Similarity(against=str(same)), _loaded(mine))
    np.testing.assert_allclose(again["cka"], alone["cka"], rtol=1e-12)
    assert again["facts"]["against"] == "same"
    different = run_probe(Similarity(against=str(other)), _loaded(mine))
    assert np.diag(different["cka"]).max() < 0.9999
    crossed = run_probe(Similarity(against=str(mine)), _loaded(other))
    np.testing.assert_allclose(crossed["cka"], different["cka"].T, rtol=1e-9)


def test_another_network_enters_the_run_key_by_its_weights(tmp_path: Path) -> None:
    mine, other = save(tmp_path / "mine.pt", seed=0), save(tmp_path / "other.pt", seed=1)
    subject = _loaded(mine)
    expected = digest(Similarity(against=str(other)), subject)
    moved = other.rename(tmp_path / "moved.pt")
    assert digest(Similarity(against=str(moved)), subject) == expected
    assert digest(Similarity(), subject) != expected
    save(moved, seed=2)
    assert digest(Similarity(against=str(moved)), _loaded(mine)) != expected


def test_networks_of_different_depth_give_a_rectangular_table(tmp_path: Path) -> None:
    mine = save(tmp_path / "mine.pt", seed=0)
    arguments = {**ARGUMENTS, "blocks": (1, 2)}
    model = models.build("resnet_demo", classes=10, image_size=16, **arguments)
    other = save(
        tmp_path / "deeper.pt", seed=0, state_dict=model.state_dict(),
        model_args={"classes": 10, "image_size": 16, **arguments},
    )  # fmt: skip
    assert run_probe(Similarity(against=str(other)), _loaded(mine))["cka"].shape == (2, 4)
    with pytest.raises(FileNotFoundError, match=r"gone\.pt"):
        Similarity(against=str(tmp_path / "gone.pt")).plan(_loaded(mine))

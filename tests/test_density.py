"""Spectral densities: quadratures against dense spectra, and a figure whose curves are densities."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from analytic import attention_net, convolution_net, dense_hessian, quadratic, run_probe, symmetric, tanh_net
from matplotlib.figure import Figure
from scipy.integrate import trapezoid
from scipy.stats import wasserstein_distance

from landscape.plots.appearance import look_of
from landscape.plots.figures import density
from landscape.probes.density import Density
from landscape.probes.trace import Trace
from landscape.products import mini_batch_means
from landscape.products.memory_forecast import forecast
from landscape.products.mini_batch_means import over_mini_batches
from landscape.products.operator import Curvature
from landscape.running.run import run
from landscape.subject.subject import Subject

NETWORKS = (tanh_net, convolution_net, attention_net)
SPECTRUM = [30.0, 20.0, -10.0, 5.0, *np.linspace(-0.1, 0.3, 96)]


def spectrum(subject: Subject) -> np.ndarray:
    """All eigenvalues of the dense Hessian over all samples."""
    sizes = [len(targets) for _, targets in subject.batches]
    dense = sum(size / sum(sizes) * dense_hessian(subject, i) for i, size in enumerate(sizes))
    return torch.linalg.eigvalsh(dense).numpy()


def known(found: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of all vectors in one row."""
    finite = np.isfinite(found["nodes"])
    return found["nodes"][finite], found["weights"][finite]


@pytest.mark.slow
def test_nodes_and_weights_are_close_to_the_dense_spectrum() -> None:
    subject = tanh_net(sizes=(6,))  # its graph is made once
    values = spectrum(subject)
    nodes, weights = known(run_probe(Density(vectors=20, steps=32), subject))
    assert wasserstein_distance(values, nodes, v_weights=weights) < 0.25 * np.abs(values).mean()
    assert nodes.max() == pytest.approx(values[-1], rel=1e-3)
    assert nodes.min() == pytest.approx(values[0], rel=1e-3)


@pytest.mark.slow
def test_moments_of_the_spectrum_come_within_their_errors() -> None:
    found = run_probe(Density(vectors=60, steps=12), quadratic(symmetric(SPECTRUM)))
    for power in (1, 2, 3, 4):
        moments = np.nansum(found["weights"] * found["nodes"] ** power, axis=1)
        error = moments.std(ddof=1) / np.sqrt(len(moments))
        assert moments.mean() == pytest.approx(np.mean(np.power(SPECTRUM, power)), abs=3.5 * error)


def test_a_quadrature_is_exact_for_polynomials_of_degree_up_to_twice_its_steps_less_one() -> None:
    subject = quadratic(symmetric(np.linspace(-1.0, 1.0, 30).tolist()))
    few, full = (run_probe(Density(vectors=1, steps=steps), subject) for steps in (4, 30))
    moment = [[np.nansum(one["weights"] * one["nodes"] ** power) for one in (few, full)] for power in range(9)]
    for power in range(8):
        assert moment[power][0] == pytest.approx(moment[power][1], abs=1e-12)
    assert moment[8][0] != pytest.approx(moment[8][1], abs=1e-6)


def test_as_many_steps_as_weights_find_every_eigenvalue() -> None:
    values = [4.0, 2.0, 1.0, -0.5, -3.0]
    found = run_probe(Density(vectors=3), quadratic(symmetric(values)))
    np.testing.assert_allclose(found["nodes"][:, :5], [sorted(values)] * 3, atol=1e-9)
    assert np.isnan(found["nodes"][:, 5:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_weights_are_shares_padded_at_the_end(network: Callable[..., Subject]) -> None:
    found = run_probe(Density(vectors=2, steps=64), network(sizes=(6,)))
    finite = np.isfinite(found["nodes"])
    assert (finite == np.isfinite(found["weights"])).all()
    assert (np.diff(finite.astype(int), axis=1) <= 0).all()
    assert (found["weights"][finite] >= 0).all()
    np.testing.assert_allclose(np.nansum(found["weights"], axis=1), 1.0, rtol=1e-12)
    assert (np.diff(found["nodes"], axis=1)[finite[:, 1:]] >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("values", [[2.0] * 6, [3.0, 3.0, 3.0, -1.0, -1.0, 0.0], [0.0] * 4, [5.0]])
def test_repeated_eigenvalues_and_single_weights_are_nodes_with_their_share(values: list[float]) -> None:
    vectors = 200 if len(set(values)) > 1 else 2
    found = run_probe(Density(vectors=vectors, steps=4), quadratic(symmetric(values)))
    nodes, weights = known(found)
    for value in set(values):
        share = weights[np.abs(nodes - value) < 1e-6].sum() / weights.sum()
        assert share == pytest.approx(values.count(value) / len(values), abs=0.08)
    assert np.abs(nodes[weights > 1e-9][:, None] - np.array(values)).min(axis=1).max() < 1e-6


def test_the_product_over_all_samples_is_that_of_one_large_mini_batch() -> None:
    whole = tanh_net(sizes=(9,), weight_decay=0.3)
    inputs, targets = whole.batches[0]
    parts = Subject(whole.model, [(inputs[:6], targets[:6]), (inputs[6:], targets[6:])], weight_decay=0.3)
    probe = Density(vectors=2, steps=10)
    one, two = (run_probe(probe, subject) for subject in (whole, parts))
    np.testing.assert_allclose(two["nodes"], one["nodes"], rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(two["weights"], one["weights"], rtol=1e-5, atol=1e-10)


def test_weight_decay_shifts_every_node() -> None:
    plain, decayed = (run_probe(Density(vectors=2, steps=10), tanh_net(weight_decay=w)) for w in (0.0, 0.5))
    np.testing.assert_allclose(decayed["nodes"], plain["nodes"] + 0.5, rtol=1e-7)
    np.testing.assert_allclose(decayed["weights"], plain["weights"], rtol=1e-5, atol=1e-12)


@pytest.mark.slow
def test_the_mean_eigenvalue_is_the_trace_over_the_number_of_weights() -> None:
    subject = tanh_net(sizes=(9,))
    trace = run_probe(Trace(vectors=subject.size), subject)["trace"]
    found = run_probe(Density(vectors=50, steps=10), subject)
    assert found["mean"] == pytest.approx(trace / subject.size, abs=3.5 * found["mean_se"])
    assert (found["smallest"], found["largest"]) == (np.nanmin(found["nodes"]), np.nanmax(found["nodes"]))


@pytest.mark.slow
def test_the_mean_square_is_the_squared_frobenius_norm_over_the_number_of_weights() -> None:
    subject = tanh_net(sizes=(6, 3))
    dense = sum(share * dense_hessian(subject, i) for i, share in enumerate((2 / 3, 1 / 3)))
    assert isinstance(dense, torch.Tensor)
    wanted = dense.square().sum().item() / subject.size
    few, many = (run_probe(Density(vectors=20, steps=steps), subject) for steps in (2, 12))
    assert few["mean_square"] == pytest.approx(many["mean_square"], rel=1e-8)  # a quadrature of two nodes is exact
    assert many["mean_square"] == pytest.approx(wanted, abs=3.5 * many["mean_square_se"])
    assert 0 < many["mean_square_se"] < 0.5 * wanted
    one = quadratic(symmetric([2.0] * 6))
    assert run_probe(Density(vectors=2, steps=3), one)["mean_square"] == pytest.approx(4.0)


def test_a_half_finished_result_is_summarised_from_its_finished_vectors() -> None:
    found = run_probe(Density(vectors=3, steps=6), tanh_net(), units=1)
    assert found["mean"] == pytest.approx(np.nansum(found["nodes"][0] * found["weights"][0]))
    assert np.isnan(found["mean_se"])
    assert "mean" not in run_probe(Density(vectors=2, steps=6), tanh_net(), units=0)


def test_a_loss_that_is_not_finite_is_stored_as_such() -> None:
    subject = quadratic(symmetric([2.0, 1.0, 0.5]), batches=[torch.tensor([[float("nan"), 0.0]])])
    found = run_probe(Density(vectors=2, steps=3), subject)
    assert np.isnan(found["nodes"]).all()
    assert found["done"].all()
    assert "mean" not in found


# --- a target of the error ---


@pytest.mark.campaign
def test_the_achieved_error_has_the_size_of_the_target() -> None:
    subject, truth = quadratic(symmetric(SPECTRUM)), float(np.mean(SPECTRUM))
    probes = [Density(vectors=8, steps=4, tol=0.3, max_vectors=2000, seed=seed) for seed in range(50)]
    found = [run_probe(probe, subject) for probe in probes]
    errors = np.array([one["mean"] / truth - 1 for one in found])
    assert all(one["within_tol"] == 1.0 and one["mean_se"] <= 0.3 * one["mean"] for one in found)
    assert 0.7 * 0.3 < np.sqrt((errors**2).mean()) < 1.25 * 0.3


def test_start_vectors_are_added_until_the_target_is_met_and_the_others_are_left_out() -> None:
    subject, probe = quadratic(symmetric(SPECTRUM)), Density(vectors=4, steps=4, tol=0.2, max_vectors=200)
    data = run(probe, subject, None).data
    assert data is not None
    used = int(np.isfinite(data["nodes"].values[:, 0]).sum())
    assert 4 < used < 200
    assert data["mean_se"] <= 0.2 * data["mean"]
    assert (data["done"] == 1).all()
    plain = run(Density(vectors=used, steps=4), subject, None).data
    assert plain is not None
    np.testing.assert_array_equal(plain["nodes"], data["nodes"][:used])
    assert plain["mean"] == data["mean"]
    at, curves = density.broadened(*density.quadratures(data), density.axis_resolution_of([data]))
    assert curves.shape == (used, len(at))


def test_a_cap_that_ends_the_run_before_the_target_is_said_and_stored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = run_probe(Density(vectors=4, steps=4, tol=0.01, max_vectors=6), quadratic(symmetric(SPECTRUM)))
    assert "above --tol 0.01, at the cap of --max-vectors 6; about --max-vectors" in caplog.text
    assert found["within_tol"] == 0.0
    assert np.isfinite(found["nodes"]).all()


# --- the figure ---


def stored(values: list[float], probe: Density) -> xr.Dataset:
    found = run_probe(probe, quadratic(symmetric(values)))
    rows = {name: (("vector", "node"), found[name]) for name in ("nodes", "weights")}
    summaries = {name: found[name] for name in ("mean", "mean_se", "smallest", "largest")}
    return xr.Dataset({**rows, **summaries}, attrs={"label": "vit", "probe": "density"})


@pytest.mark.parametrize("values", [SPECTRUM, [2.0] * 5, [0.0] * 5])
def test_every_curve_integrates_to_one(values: list[float]) -> None:
    data = stored(values, Density(vectors=3, steps=12))
    at, curves = density.broadened(*density.quadratures(data), density.axis_resolution_of([data]))
    np.testing.assert_allclose(trapezoid(curves, at, axis=1), 1.0, rtol=1e-3)


def test_the_bulk_is_resolved_beside_outliers_a_thousand_times_as_large() -> None:
    values = [300.0, *np.linspace(0.0, 0.1, 60), *np.linspace(0.4, 0.5, 40)]
    data = stored(values, Density(vectors=4, steps=30))
    at, curves = density.broadened(*density.quadratures(data), density.axis_resolution_of([data]))
    gap, left, right, outlier = np.interp([0.25, 0.05, 0.45, 300.0], at, curves.mean(axis=0))
    assert 3 * gap < min(left, right)
    assert 0 < outlier < 1e-3 * left


def test_the_line_is_the_mean_over_vectors_and_the_band_its_interval_from_four_on() -> None:
    for vectors in (3, 5):
        data = stored(SPECTRUM, Density(vectors=vectors, steps=12))
        ax = density.draw(data, Figure().subplots(), look=look_of(data))
        _, curves = density.broadened(*density.quadratures(data), density.axis_resolution_of([data]))
        mean = curves.mean(axis=0)
        np.testing.assert_allclose(ax.lines[0].get_ydata(), mean)
        assert (ax.get_xscale(), ax.get_yscale()) == ("asinh", "log")
        assert len(ax.collections) == (vectors >= 4)
    relative = curves.std(axis=0, ddof=1) / np.sqrt(5) / mean
    highest = ax.collections[0].get_paths()[0].vertices[:, 1].max()
    assert highest == pytest.approx((mean * np.exp(scipy.stats.t.ppf(0.975, 4) * relative)).max())


def test_graphs_of_mini_batches_are_kept_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    prepare = Curvature.product
    monkeypatch.setattr(Curvature, "product", lambda self, i, part: prepared.append(i) or prepare(self, i, part))
    found = []
    for sizes, room, batches in (((4,), 0.0, [0]), ((4, 2), 0.0, [0, 1, 1]), ((4, 2), math.inf, [0, 1])):
        monkeypatch.setattr(mini_batch_means, "room_for_graphs", lambda device, room=room: room)
        monkeypatch.setattr(mini_batch_means, "forecast", forecast if room else None)  # whose pass takes memory
        prepared.clear()
        subject = tanh_net(sizes=sizes)
        product = over_mini_batches(Curvature(subject, subject.parameters, "double-backward"))
        found.append(product(product(torch.ones(subject.size, dtype=torch.float64))))
        assert prepared == batches
    assert torch.equal(found[1], found[2])


def test_params_restricts_the_density_to_a_diagonal_block() -> None:
    subject = tanh_net(sizes=(6,))
    found = run_probe(Density(vectors=6, steps=24, params=r"^2\."), subject)
    block = torch.linalg.eigvalsh(dense_hessian(subject)[-24:, -24:])
    assert found["largest"] == pytest.approx(block[-1].item(), rel=1e-9)
    assert found["smallest"] == pytest.approx(block[0].item(), abs=1e-9)

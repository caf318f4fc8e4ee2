"""Gradient noise scales: on linear regression with a known covariance, against formulas by loops, and at zero."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from analytic import convolution_net, dense_hessian, quadratic, rebatched, run_probe, symmetric, tanh_net
from torch import Tensor, nn

from landscape.data.dataset import Batches, Images
from landscape.options import OptionError
from landscape.probes.noise_scale import NoiseScale
from landscape.products.mini_batch_means import mean_gradient, sample_groups
from landscape.statistics.ratio import gradient_curvature, noise_scales, ratio, squared_gradient
from landscape.subject.losses import LossTraits
from landscape.subject.subject import Subject

FEATURES = 6
SPECTRUM = torch.arange(1.0, FEATURES + 1, dtype=torch.float64) ** -1.0  # variances of the inputs
OFF = 0.6  # of every weight from the true one
NOISE = 1.0  # variance of the targets


def half_squared(outputs: Any, targets: Any) -> Tensor:
    """(output - target)^2 / 2 of every sample."""
    return 0.5 * (outputs.flatten() - targets).square()


def regression(samples: int, seed: int) -> Subject:
    """Linear regression with normal inputs of covariance C, off its optimum by d: G = C d, H_sample = x x'."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64) * SPECTRUM.sqrt()
    targets = math.sqrt(NOISE) * torch.randn(samples, generator=generator, dtype=torch.float64)
    model = nn.Linear(FEATURES, 1, bias=False).double().eval()
    nn.init.constant_(model.weight, OFF)
    return Subject(model, [(inputs, targets)], losses=half_squared)


def truth() -> dict[str, float]:
    """In closed form: S = (d'C d + noise) C + C d d'C, because cov(x x'd) = (d'C d) C + C d d'C for normal x."""
    c, d = torch.diag(SPECTRUM), torch.full((FEATURES,), OFF, dtype=torch.float64)
    gradient = c @ d
    covariance = (d @ c @ d + NOISE) * c + torch.outer(gradient, gradient)
    found = {
        "squared_gradient": gradient @ gradient,
        "gradient_noise": covariance.trace(),
        "gradient_curvature": gradient @ c @ gradient,
        "curved_gradient_noise": (c @ covariance).trace(),
    }
    values = {name: value.item() for name, value in found.items()}
    return values | {
        "simple": values["gradient_noise"] / values["squared_gradient"],
        "curvature": values["curved_gradient_noise"] / values["gradient_curvature"],
    }


@pytest.mark.slow
def test_every_part_is_unbiased_and_its_error_has_the_size_of_the_spread() -> None:
    redraws = [run_probe(NoiseScale(groups=8), regression(64, seed)) for seed in range(40)]
    for name in ("squared_gradient", "gradient_noise", "gradient_curvature", "curved_gradient_noise"):
        values = np.array([found[name] for found in redraws])
        errors = np.array([found[f"{name}_se"] for found in redraws])
        assert abs(values.mean() - truth()[name]) < 4 * values.std() / math.sqrt(len(values)), name
        assert 0.7 < math.sqrt((errors**2).mean()) / values.std() < 1.4, name


@pytest.mark.campaign
def test_intervals_cover_the_truth() -> None:
    redraws = [run_probe(NoiseScale(groups=12), regression(384, seed)) for seed in range(24)]
    for kind in ("simple", "curvature"):
        inside = [found[f"{kind}_low"] <= truth()[kind] <= found[f"{kind}_high"] for found in redraws]
        assert sum(inside) >= 20  # of 24 at 95 %: fewer have a probability of 0.6 %
        values = np.array([found[kind] for found in redraws if found[f"{kind}_resolved"]])
        assert abs(np.median(values) / truth()[kind] - 1) < 0.2


@pytest.mark.parametrize("net", [tanh_net, convolution_net])
def test_the_numbers_are_those_of_dense_hessians_and_loops_over_pairs(net: Any) -> None:
    subject, probe = net(sizes=(6, 6, 6, 6)), NoiseScale(groups=3)
    subject.weight_decay = 0.3
    found, size = run_probe(probe, subject), 2
    quarters = rebatched(subject.batches, size)
    shift = subject.weight_decay * torch.cat([p.detach().flatten() for p in subject.parameters.values()])
    one = Subject(subject.model, quarters)
    x = [flat_gradient(one, i) + shift for i in range(12)]
    hessians = [dense_hessian(one, i) + subject.weight_decay * torch.eye(len(shift)).double() for i in range(12)]
    g = [torch.stack(x[4 * i : 4 * i + 4]).mean(dim=0) for i in range(3)]
    pairs = [g[i] @ g[j] for i in range(3) for j in range(3) if i != j]
    assert found["squared_gradient"] == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-9)
    noise = [size / 3 * sum((x[4 * i + q] - g[i]).square().sum() for q in range(4)) for i in range(3)]
    np.testing.assert_allclose(found["noise"], [float(one) for one in noise], rtol=1e-9)
    for i in range(3):
        a, b, c, d = range(4 * i, 4 * i + 4)
        late, early = (hessians[c] + hessians[d]) / 2, (hessians[a] + hessians[b]) / 2
        u, v = x[a] - x[b], x[c] - x[d]
        assert found["curved_noise"][i] == pytest.approx(
            (size / 2 * (u @ late @ u + v @ early @ v) / 2).item(), rel=1e-8
        )
        (k,) = np.flatnonzero(np.isfinite(found["curved_inner"][i]))
        (j,) = {0, 1, 2} - {i, int(k)}
        whole = (early + late) / 2
        assert found["curved_inner"][i, k] == pytest.approx((g[j] @ whole @ g[int(k)]).item(), rel=1e-8)
    assert found["loss"].mean() == pytest.approx(np.mean([subject.loss(i).item() for i in range(4)]), rel=1e-12)


def flat_gradient(subject: Subject, i: int) -> Tensor:
    gradients = torch.autograd.grad(subject.loss(i), list(subject.parameters.values()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_the_simple_noise_scale_is_that_of_the_published_equations() -> None:
    """Eq. A.2 for the batch sizes m and N, averaged over all quarters, up to the pairs inside a group."""
    subject = tanh_net(sizes=(48,))
    found = run_probe(NoiseScale(groups=3, simple=True), subject)
    small, big = 4, 48
    x = [flat_gradient(Subject(subject.model, rebatched(subject.batches, small)), i) for i in range(12)]
    norm_small = torch.stack([one.square().sum() for one in x]).mean().item()
    norm_big = torch.stack(x).mean(dim=0).square().sum().item()
    squared = (big * norm_big - small * norm_small) / (big - small)
    noise = (norm_small - norm_big) / (1 / small - 1 / big)
    inside = [x[i] @ x[j] for g in range(3) for i in range(4 * g, 4 * g + 4) for j in range(4 * g, 4 * g + 4) if i != j]
    all_pairs = 12 * 11 * squared  # the published estimate is the mean over all pairs of quarters
    assert found["squared_gradient"] == pytest.approx(
        (all_pairs - float(sum(inside))) / (12 * 11 - len(inside)), rel=1e-9
    )
    within = noise + small * (squared - float(sum(inside)) / len(inside))
    assert found["gradient_noise"] == pytest.approx(within, rel=1e-9)
    assert "curvature" not in found


@pytest.mark.slow
def test_quarters_show_the_variance_between_classes_that_a_balanced_order_hides() -> None:
    classes = torch.arange(240) % 4
    subject = regression(240, 0)
    inputs = torch.eye(4, FEATURES, dtype=torch.float64)[classes]
    images = Images(inputs, torch.zeros(240, dtype=torch.float64), "made", 0, 0)
    balanced = Subject(subject.model, Batches(images, 120), losses=half_squared)
    gradients = OFF * inputs  # x (x'd), all of whose variance is between classes
    expected = (gradients - gradients.mean(dim=0)).square().sum(dim=1).mean().item()
    found = [run_probe(NoiseScale(groups=6, simple=True, seed=seed), balanced) for seed in range(20)]
    assert np.mean([one["gradient_noise"] for one in found]) == pytest.approx(expected * 40 / 39, rel=0.05)
    assert found[0]["squared_gradient"] == pytest.approx(gradients.mean(dim=0).square().sum().item(), rel=1e-9)


def test_a_gradient_that_is_not_told_apart_from_zero_gives_a_lower_end_and_no_number() -> None:
    subject = regression(256, 1)
    nn.init.zeros_(subject.model.weight)  # type: ignore[arg-type]
    found = run_probe(NoiseScale(groups=16), subject)
    for kind in ("simple", "curvature"):
        assert found[f"{kind}_resolved"] == 0.0
        assert math.isnan(found[kind])
        assert math.isnan(found[f"{kind}_se"])
        assert found[f"{kind}_high"] == math.inf
        assert 1 < found[f"{kind}_low"] < math.inf
    assert found["gradient_noise"] > 5 * found["gradient_noise_se"]


def test_neither_a_zero_gradient_nor_the_absence_of_noise_divides_by_zero() -> None:
    found = run_probe(
        NoiseScale(groups=3), quadratic(symmetric([1.0, 2.0]), weight=torch.zeros(1, 2), batches=[torch.ones(12, 2)])
    )
    assert (found["squared_gradient"], found["gradient_noise"], found["simple_resolved"]) == (0.0, 0.0, 0.0)
    assert (found["simple_low"], found["simple_high"]) == (0.0, math.inf)
    found = run_probe(NoiseScale(groups=3), quadratic(symmetric([1.0, 2.0]), batches=[torch.ones(12, 2)]))
    assert found["simple_resolved"] == found["curvature_resolved"] == 1.0
    assert found["simple"] == pytest.approx(0.0, abs=1e-12)
    assert found["curvature"] == pytest.approx(0.0, abs=1e-12)


def test_fieller_is_the_set_of_ratios_that_a_t_test_keeps() -> None:
    rng = np.random.default_rng(0)
    above, below = 3 + rng.normal(size=12), 2 + 0.5 * rng.normal(size=12)
    found = ratio(above, below)
    for end in (found.low, found.high):
        residual = above - end * below
        t = residual.mean() / (residual.std(ddof=1) / math.sqrt(12))
        assert abs(t) == pytest.approx(2.200985, rel=1e-6)  # the 97.5 % quantile of t with 11 degrees of freedom
    assert found.low < found.value == above.mean() / below.mean() < found.high


def test_jackknife_pseudo_values_are_those_of_leaving_groups_out() -> None:
    rng = np.random.default_rng(1)
    g = rng.normal(size=(7, 3)) + 1
    inner, n = g @ g.T, 7

    def mean(rows: np.ndarray) -> float:
        return float(rows[~np.eye(len(rows), dtype=bool)].mean())

    wanted = [n * mean(inner) - (n - 1) * mean(np.delete(np.delete(inner, i, 0), i, 1)) for i in range(n)]
    np.testing.assert_allclose(squared_gradient(inner)[0], wanted, rtol=1e-10)


def test_some_finished_groups_give_numbers_and_fewer_than_three_none() -> None:
    subject, probe = regression(256, 2), NoiseScale(groups=8)
    whole, half = run_probe(probe, subject), run_probe(probe, subject, units=5)
    assert half["squared_gradient"] == pytest.approx(whole["squared_gradient"], rel=0.5)
    assert half["gradient_noise"] == pytest.approx(whole["noise"][:5].mean())
    assert "simple" not in run_probe(probe, subject, units=2)


def test_a_group_that_is_not_finite_is_left_out() -> None:
    data = {
        name: np.asarray(value)
        for name, value in run_probe(NoiseScale(groups=8), regression(256, 2)).items()
        if name != "facts"
    }
    data["inner"][3], data["inner"][:, 3] = np.nan, np.nan
    found = noise_scales(data)
    assert math.isfinite(found["simple"])
    assert found["gradient_noise"] == pytest.approx(np.delete(data["noise"], 3).mean())
    turned = np.full((4, 4), np.nan)
    assert np.isnan(gradient_curvature(turned)[0]).all()


@pytest.mark.slow
def test_quarters_do_not_depend_on_the_batch_size() -> None:
    subject = tanh_net(sizes=(48,))
    others = [Subject(subject.model, rebatched(subject.batches, size)) for size in (5, 16, 48)]
    found = [run_probe(NoiseScale(groups=4), one) for one in others]
    for name in ("inner", "noise", "curved_inner", "curved_noise", "samples"):
        for other in found[1:]:
            np.testing.assert_allclose(other[name], found[0][name], rtol=1e-9, atol=1e-14)
    gradient, _ = mean_gradient(others[0], others[0].parameters, sample_groups(others[0], 4, 0).groups[1][2])
    assert len(gradient) == 59


def test_params_restricts_both_to_the_selected_weights() -> None:
    subject = tanh_net(sizes=(24,))
    found = run_probe(NoiseScale(groups=3, params=r"^2\."), subject)
    x = [flat_gradient(Subject(subject.model, rebatched(subject.batches, 2)), i)[-24:] for i in range(12)]
    g = [torch.stack(x[4 * i : 4 * i + 4]).mean(dim=0) for i in range(3)]
    assert found["inner"][0, 1] == pytest.approx((g[0] @ g[1]).item(), rel=1e-9)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(OptionError, match="--groups must be at least 3"):
        NoiseScale(groups=2)
    with pytest.raises(ValueError, match=r"--groups 32 needs 128 samples, .* got 12; .* at most --groups 3"):
        NoiseScale().plan(tanh_net(sizes=(12,)))
    with pytest.raises(ValueError, match=r"got 6; raise --samples$"):
        NoiseScale().plan(tanh_net(sizes=(6,)))
    coupled = tanh_net(sizes=(12,))
    coupled.traits = LossTraits(coupled=True)
    with pytest.raises(ValueError, match="couples the samples"):
        NoiseScale(groups=3).plan(coupled)

"""The surface probe: closed forms, invariances, standard errors and grids."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from analytic import (
    Quadratic,
    attention_net,
    batches_of,
    convolution_net,
    quadratic,
    rebatched,
    run_probe,
    same_state,
    state,
    symmetric,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from landscape import models
from landscape.probes.surface import Surface
from landscape.statistics.surface_summary import height
from landscape.subject.loading.identity import asked, digest, identity
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.directions import Normalize, ticks
from landscape.weight_space.plane_evaluator import L2Definition
from landscape.weight_space.planes import plane_of

CURVATURES = [4.0, 3.0, 2.5, 1.0, -1.5, -2.0]


def _bowl() -> Subject:
    """A saddle in six dimensions, not at its stationary point."""
    weight = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, -1.0]])
    return quadratic(symmetric(CURVATURES), weight=weight, slope=torch.linspace(-1, 1, 6))


def _directions(subject: Subject, probe: Surface) -> tuple[Tensor, Tensor]:
    plane = plane_of(subject, "random", normalize=probe.normalize, ignore=probe.ignore, seed=probe.seed)
    first, second = (direction["weight"].flatten() for direction in plane.directions)
    return first, second


@pytest.mark.parametrize("normalize", ["filter", "layer", "none", "park2022"])
def test_a_quadratic_loss_has_its_closed_form_on_an_oblong_grid_off_its_centre(normalize: Normalize) -> None:
    subject, probe = _bowl(), Surface(resolution="6,4", range="-0.5:2,-1:0.3", normalize=normalize, seed=3)
    found = run_probe(probe, subject)
    assert isinstance(subject.model, Quadratic)
    first, second = _directions(subject, probe)
    expected = np.empty((6, 4))
    for i, x in enumerate(np.linspace(-0.5, 2, 6)):
        for j, y in enumerate(np.linspace(-1, 0.3, 4)):
            w = (subject.model.weight.flatten() + x * first + y * second).detach()
            expected[i, j] = w @ subject.model.matrix @ w / 2 + subject.model.slope @ w
            assert found["l2"][i, j] == pytest.approx((w @ w / 2).item(), rel=1e-12)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-12)  # a transposed grid would not fit
    np.testing.assert_allclose(found["x"], np.linspace(-0.5, 2, 6))
    np.testing.assert_allclose(found["y"], np.linspace(-1, 0.3, 4))


@pytest.mark.parametrize("l2_definition", ["squared", "park2022"])
def test_with_weight_decay_the_objective_is_stored_and_belongs_to_the_question(l2_definition: L2Definition) -> None:
    plain, probe = _bowl(), Surface(resolution="5,3", l2_definition=l2_definition)
    decayed = replace(plain, weight_decay=0.05)
    found = run_probe(probe, decayed)
    weight = plain.parameters["weight"].detach()
    assert found["l2"][2].min() > 0
    np.testing.assert_allclose(found["objective"], found["loss"] + 0.05 * found["l2"], rtol=1e-14)
    centre = run_probe(replace(probe, resolution="3"), decayed)
    l2 = (weight.square().sum() / 2 if l2_definition == "squared" else weight.norm()).item()
    assert centre["objective"][1, 1] == pytest.approx(centre["loss"][1, 1] + 0.05 * l2, rel=1e-12)
    half = run_probe(probe, decayed, units=7)
    assert np.isfinite(half["objective"]).sum() == 7
    assert "objective" not in run_probe(probe, plain)
    assert digest(probe, plain) != digest(probe, decayed)


@pytest.mark.parametrize("resolution", [3, 21, 51, 99])
def test_the_centre_is_the_checkpoint_bit_for_bit(resolution: int) -> None:
    torch.manual_seed(0)
    model = models.build("resnet_demo", classes=10, image_size=8).eval()  # float32
    batches = [(x.float(), y) for x, y in batches_of((3, 8, 8), (8, 5), 10)]
    subject, probe = Subject(model, batches), Surface(resolution=str(resolution))
    plan = probe.plan(subject)
    centre = plan.unit((resolution // 2, resolution // 2))
    assert (centre.at["x"], centre.at["y"]) == (0.0, 0.0)
    losses, right = per_sample(subject)
    found = probe.measure(subject, centre)
    assert np.float32(found["loss"]) == np.float32(losses.mean().item())
    assert found["accuracy"] == right.mean().item()


@pytest.mark.parametrize("radius", [0.1, 0.3, 1.0, 1.5])
def test_every_odd_number_of_ticks_holds_an_exact_zero(radius: float) -> None:
    for count in range(3, 400, 2):
        values = ticks(-radius, radius, count)
        assert values[count // 2] == 0.0
        assert (values[0], values[-1]) == (-radius, radius)


def _relu_net(scale: float) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.ReLU(), nn.Linear(9, 3, bias=False)).double()
    with torch.no_grad():
        for layer, factor in ((0, scale), (2, 1 / scale)):
            model.get_submodule(str(layer)).get_parameter("weight").mul_(factor)
    return Subject(model, batches_of((4,), (12,), 3))


def test_rescaling_a_layer_and_the_next_leaves_the_surface_unchanged() -> None:
    probe = Surface(resolution="5")
    plain, scaled = (run_probe(probe, _relu_net(scale))["loss"] for scale in (1.0, 37.0))
    np.testing.assert_allclose(scaled, plain, rtol=1e-10)
    unscaled = run_probe(replace(probe, normalize="none"), _relu_net(37.0))["loss"]
    assert np.abs(unscaled / run_probe(replace(probe, normalize="none"), _relu_net(1.0))["loss"] - 1).max() > 1e-2


def test_rescaling_single_filters_with_their_statistics_leaves_the_surface_unchanged() -> None:
    probe, scales = Surface(resolution="5"), torch.tensor([0.01, 1.0, 7.0, 300.0], dtype=torch.float64)
    plain, scaled = convolution_net(), convolution_net()
    for subject in (plain, scaled):
        convolution, norm = (subject.model.get_submodule(name) for name in "01")
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        norm.eps = 0.0
        if subject is scaled:
            with torch.no_grad():
                convolution.weight.mul_(scales[:, None, None, None])
                convolution.get_parameter("bias").mul_(scales)
                norm.get_buffer("running_mean").mul_(scales)
                norm.get_buffer("running_var").mul_(scales**2)
    np.testing.assert_allclose(run_probe(probe, scaled)["loss"], run_probe(probe, plain)["loss"], rtol=1e-10)


def test_the_surface_does_not_depend_on_batch_size_or_on_the_order_of_work() -> None:
    subject = attention_net(sizes=(6, 6, 3))
    other = replace(subject, batches=rebatched(subject.batches, 4))
    probe = Surface(resolution="3,4")
    found, again = run_probe(probe, subject), run_probe(probe, other)
    for name in ("loss", "loss_se", "l2", "accuracy"):
        np.testing.assert_allclose(found[name], again[name], rtol=1e-12)
    for unit in reversed(list(probe.plan(subject).units())):
        assert probe.measure(subject, unit)["loss"] == found["loss"][unit.index]


def test_seeds_and_the_two_axes_are_different_directions() -> None:
    subject = attention_net()
    facts = run_probe(Surface(resolution="2"), subject)["facts"]
    assert abs(facts["cosine"]) < 0.5
    one, other = (run_probe(Surface(resolution="3", seed=seed), subject)["loss"] for seed in (0, 1))
    assert not np.allclose(one[0], other[0])
    assert [variant.seed for variant in Surface(directions=3, seed=4).variants()] == [4, 5, 6]


@pytest.mark.campaign
def test_the_standard_error_covers_the_loss_of_all_samples_in_nineteen_of_twenty_subsets() -> None:
    subject = attention_net(sizes=(4000,))
    probe, generator = Surface(resolution="2", range="-0.3:0.5"), torch.Generator().manual_seed(0)
    inputs, targets = subject.batch(0)
    unit = next(probe.plan(subject).units())
    whole, covered = probe.measure(subject, unit)["loss"], 0
    for _ in range(200):
        rows = torch.randint(4000, (50,), generator=generator)
        found = probe.measure(replace(subject, batches=[(inputs[rows], targets[rows])]), unit)
        covered += abs(found["loss"] - whole) < 2 * found["loss_se"]
    assert 0.90 <= covered / 200 <= 0.99


def test_a_cell_that_overflows_is_finished_and_not_finite() -> None:
    subject = quadratic(torch.eye(4).float() * 1e30, weight=torch.full((2, 2), 1e-3))
    found = run_probe(Surface(resolution="3", range="1e9"), subject)
    assert found["loss"][1, 1] == pytest.approx(2e24, rel=1e-6)
    assert np.isinf(np.delete(found["loss"].ravel(), 4)).all()
    assert found["done"].all()
    assert found["non_finite"] == pytest.approx(8 / 9)


def test_confident_mistakes_far_from_the_centre_have_large_and_finite_losses() -> None:
    model = nn.Linear(2, 3, bias=False)
    subject = Subject(model, [(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))])
    loss = run_probe(Surface(resolution="5", range="1e5"), subject)["loss"]
    assert np.isfinite(loss).all()
    assert loss.max() > 1e4  # log(softmax) would be infinite from 104 on


def test_an_abandoned_sweep_restores_weights_and_statistics() -> None:
    subject, probe = convolution_net(), Surface(resolution="3", bn="recalibrate:1")
    kept = state(subject.model)
    sweep = probe.sweep(subject, list(probe.plan(subject).units()))
    assert isinstance(sweep, Generator)
    next(sweep)
    assert not same_state(subject.model, kept)
    sweep.close()
    assert same_state(subject.model, kept)


def test_recalibrating_changes_the_loss_and_not_the_weights() -> None:
    subject = convolution_net()
    frozen, refreshed = (run_probe(Surface(resolution="3", bn=bn), subject) for bn in ("frozen", "recalibrate:2"))
    assert frozen["loss"][1, 1] != pytest.approx(refreshed["loss"][1, 1], rel=1e-3)
    np.testing.assert_allclose(frozen["l2"], refreshed["l2"])


def test_the_height_of_a_paraboloid_is_its_closed_form() -> None:
    x, y = np.linspace(-1, 1, 201), np.linspace(-1.2, 1.1, 231)
    loss = 5.0 + 3 * x[:, None] ** 2 + 7 * y[None, :] ** 2 + 2 * x[:, None] * y[None, :] + x[:, None]
    radii = np.array([0.1, 0.25, 0.5, 1.0, 1.05])
    found = height(x, y, loss, radii)
    np.testing.assert_allclose(found[:-1], 5 * radii[:-1] ** 2, rtol=1e-2)  # (3 + 7) / 2
    assert np.isnan(found[-1])


def test_heights_wait_for_the_cells_they_need() -> None:
    probe, subject = Surface(resolution="5"), _bowl()
    assert np.isfinite(run_probe(probe, subject)["height"]).all()
    half = run_probe(probe, subject, units=12)
    assert np.isnan(half["height"]).all()
    assert half["non_finite"] == 0.0
    assert np.isnan(run_probe(probe, subject, units=0)["non_finite"])


def test_the_run_key_does_not_depend_on_how_numbers_are_spelt_or_without_a_cap_on_the_batch_size() -> None:
    subject = attention_net(sizes=(6, 6))
    other = replace(subject, batches=rebatched(subject.batches, 4))
    assert asked(Surface(), subject) == asked(Surface(), other)
    assert asked(Surface(cap=3.0), subject) != asked(Surface(cap=3.0), other)
    assert asked(Surface(resolution=5, range=1), subject) == asked(Surface(resolution="5,5", range="-1:1"), subject)  # type: ignore[arg-type]
    assert asked(Surface(range="1"), subject) == asked(Surface(), subject)
    assert asked(Surface(seed=1), subject) != asked(Surface(), subject)


def test_the_standard_error_of_the_rise_is_paired_over_samples() -> None:
    subject = attention_net(sizes=(7, 4))
    probe = Surface(resolution="5", range="0.2")
    found = run_probe(probe, subject)
    assert found["rise_se"][2, 2] == 0.0
    before = per_sample(subject)[0].numpy()
    plane = plane_of(subject, "random", normalize="filter", ignore=probe.ignore, seed=0)
    with torch.no_grad():
        for direction, step in zip(plane.directions, (-0.2, 0.1), strict=True):
            for name, change in direction.items():
                subject.parameters[name].add_(change, alpha=step)
    paired = per_sample(subject)[0].numpy() - before
    assert found["rise_se"][0, 3] == pytest.approx(paired.std(ddof=1) / 11**0.5, rel=1e-9)
    assert found["rise_se"][0, 3] < found["loss_se"][0, 3]


@pytest.mark.slow
def test_a_capped_surface_leaves_points_early_that_are_clearly_above() -> None:
    subject = attention_net(sizes=(32,) * 8)
    whole = run_probe(Surface(resolution="5", range="3"), subject)
    cap = float(np.median(whole["loss"]))
    found = run_probe(Surface(resolution="5", range="3", cap=cap), subject)
    early = found["n"] < 256
    assert early.any()
    assert set(np.unique(found["n"])) <= {32.0, 64.0, 128.0, 256.0}
    np.testing.assert_array_equal(found["loss"][~early], whole["loss"][~early])
    assert (whole["loss"][early] > cap).all()  # no wrong stop
    assert (np.abs(found["loss"] - whole["loss"])[early] < 4 * found["loss_se"][early]).all()


def test_a_cap_leaves_points_that_are_not_finite_and_never_judges_by_few_samples() -> None:
    subject = quadratic(torch.eye(4).float() * 1e30, weight=torch.full((2, 2), 1e-3), batches=[torch.eye(2)] * 32)
    found = run_probe(Surface(resolution="3", range="1e9", cap=1e30), subject)
    assert found["n"][1, 1] == 64
    assert (np.delete(found["n"].ravel(), 4) == 32).all()
    assert (~np.isfinite(np.delete(found["loss"].ravel(), 4))).all()


def test_summaries_are_those_of_a_quadratic() -> None:
    matrix = symmetric([4.0, 1.0, 0.5, 0.2, 0.1, -3.0])
    subject = quadratic(matrix, weight=torch.zeros(2, 3), batches=[torch.tensor([[1.0, 0.0], [1.5, 0.0], [0.5, 0.0]])])
    probe = Surface(resolution="11", normalize="none")
    found = run_probe(probe, subject)
    first, second = _directions(subject, probe)
    expected = [(a @ matrix @ b).item() for a, b in ((first, first), (first, second), (second, second))]
    np.testing.assert_allclose(found["curvature"], expected, rtol=1e-9)
    share = 0.5 / 3**0.5  # of the standard error of the scales 1, 1.5, 0.5 over their mean
    assert found["curvature_se"][0] >= share * abs(expected[0]) * (1 - 1e-9)
    assert found["height"][2] == pytest.approx(0.25 * (expected[0] + expected[2]) / 4, rel=0.1)
    assert found["height_se"][2] >= share * abs(found["height"][2]) * (1 - 1e-9)
    convex = expected[0] * expected[2] > expected[1] ** 2 and expected[0] > 0
    assert found["non_convex"] == (0.0 if convex else 1.0)
    assert found["minima"] >= found["clear_minima"] >= 1
    half = run_probe(probe, subject, units=70)
    assert np.isnan(half.get("minima", np.nan))


def test_every_parameter_that_can_change_the_numbers_enters_the_run_key() -> None:
    subject = _bowl()
    assert asked(Surface(tolerance=0.1), subject) == asked(Surface(), subject)
    changes = {"precision": "bf16", "cap": 2.0, "preview": True, "margin": "1"}
    for name, value in changes.items():
        assert asked(replace(Surface(), **{name: value}), subject) != asked(Surface(), subject)


def test_an_even_resolution_without_a_centre_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    Surface(resolution="5,6").plan(_bowl())
    assert "has no point at the centre" in caplog.text
    caplog.clear()
    Surface(resolution="5,7").plan(_bowl())
    assert not caplog.text


def test_a_filter_of_fused_queries_keys_and_values_is_one_row_and_tied_weights_move_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)).double()
    first = model.get_submodule("0")
    assert isinstance(first, nn.Linear)
    model.get_submodule("2").weight = first.weight
    subject = Subject(model, batches_of((4,), (6,), 3))
    assert list(subject.parameters) == ["0.weight", "3.weight", "3.bias"]
    plane = plane_of(subject, "random", normalize="filter", ignore="", seed=0)
    assert set(plane.directions[0]) == {"0.weight", "3.weight"}
    torch.testing.assert_close(plane.directions[0]["0.weight"].norm(dim=1), first.weight.detach().norm(dim=1))
    found = run_probe(Surface(resolution="3"), subject)
    first.weight.data.add_(plane.directions[0]["0.weight"])
    model.get_submodule("3").get_parameter("weight").data.add_(plane.directions[0]["3.weight"])
    assert found["loss"][2, 1] == pytest.approx(per_sample(subject)[0].mean().item(), rel=1e-12)


def test_batches_that_change_or_can_be_read_only_once_are_rejected() -> None:
    model = nn.Linear(4, 3).double().eval()
    with pytest.raises(ValueError, match=r"batches is a DataLoader, expected a sequence.*list\(...\)"):
        Subject(model, DataLoader(TensorDataset(torch.zeros(4, 4)), shuffle=True))  # type: ignore[arg-type]

    class Fresh(list[tuple[Tensor, Tensor]]):
        def __getitem__(self, i: Any) -> Any:
            return torch.randn(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long)

    with pytest.raises(ValueError, match=r"batches \(Fresh\) gives others when it is read again"):
        identity(Subject(model, Fresh(batches_of((4,), (5,), 3))), ())

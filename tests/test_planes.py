"""Planes through weights: the points that they contain, their evaluation, and the restoration of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import (
    attention_net,
    convolution_net,
    losses_with,
    moved,
    quadratic,
    run_probe,
    same_state,
    state,
    symmetric,
)
from simulated_cuda import simulated_cuda
from torch import Tensor

from landscape.options import OptionError
from landscape.probes.line import Line
from landscape.probes.surface import Surface
from landscape.products.vectors import dot, flat, inner
from landscape.subject.loading.identity import asked
from landscape.subject.losses import cross_entropy
from landscape.subject.subject import Subject
from landscape.weight_space.directions import POSITIONS, through_checkpoints, ticks
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import LOSS_CHANGE, Plane, half_range, plane_of
from landscape.weight_space.weights_in_place import RunningStatistics, WeightsInPlace, barycentric


def _plane(subject: Subject, kind: str, *, seed: int = 0) -> Plane:
    return plane_of(subject, kind, normalize="filter", ignore=POSITIONS, seed=seed)


def _shifted(subject: Subject, *moves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The subject's state with its parameters moved."""
    weights = dict(state(subject.model))
    for move in moves:
        for name, change in move.items():
            weights[name] = weights[name] + change
    return weights


def _run(folder: Path, states: Iterable[dict[str, Tensor]]) -> Path:
    folder.mkdir()
    for epoch, weights in enumerate(states):
        torch.save(weights, folder / f"epoch_{epoch:03}.pt")
    return folder


@pytest.mark.parametrize("through", [0, 1, 2])
def test_the_plane_of_a_run_of_three_snapshots_passes_through_each(tmp_path: Path, through: int) -> None:
    subject = attention_net()
    states = [dict(state(subject.model)), *(moved(subject, seed) for seed in (1, 2))]
    run = _run(tmp_path / "run", states)
    expected = [losses_with(subject, weights).mean() for weights in states]
    subject.model.load_state_dict(states[through])
    plane = _plane(subject, str(run))
    with PlaneEvaluator(subject, plane) as evaluator:
        found = [evaluator.at(*point)["loss"] for point in plane.path.T]
    assert found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(plane.path[:, through], 0.0, atol=1e-12)
    assert plane.norms == pytest.approx((1.0, 1.0))
    assert plane.cosine == pytest.approx(0.0, abs=1e-12)
    for points, (low, high) in zip(plane.path, plane.spans, strict=True):
        assert low < points.min()
        assert points.max() < high


@pytest.mark.parametrize("resolution", ["5", "8,15"])
def test_the_grid_of_a_run_holds_the_checkpoint_itself(resolution: str, tmp_path: Path) -> None:
    subject = attention_net()
    run = _run(tmp_path / "run", [moved(subject, k) for k in range(3)])
    probe = Surface(plane=str(run), resolution=resolution)
    grid, spans = probe.plan(subject).over, _plane(subject, str(run)).spans
    for along, (low, high) in zip(grid.values(), spans, strict=True):
        assert (along == 0.0).sum() == 1
        assert along[-1] - along[0] == pytest.approx(high - low)
        assert abs(along[0] - low) <= 0.5 * (along[1] - along[0]) * (1 + 1e-9)
    requested = replace(probe, range="-3:4").plan(subject).over["x"]
    assert (requested[0], requested[-1]) == (-3.0, 4.0)


def test_the_range_of_the_eigen_plane_follows_from_its_curvatures() -> None:
    offset = torch.tensor([[1.0, 4.0]])  # a loss of 4 at the saddle
    subject = quadratic(symmetric([200.0, 3.0, 1.0, -5.0]), weight=torch.zeros(1, 4), batches=(offset,))
    plane = _plane(subject, "eigen")
    assert plane.norms == pytest.approx((1.0, 1.0))
    assert plane.cosine == pytest.approx(0.0, abs=1e-6)
    (_, x), (_, y) = plane.spans
    assert x == pytest.approx((2 * LOSS_CHANGE * 4.0 / 5.0) ** 0.5, rel=0.01)
    assert y == pytest.approx((2 * LOSS_CHANGE * 4.0 / 200.0) ** 0.5, rel=0.03)
    found = run_probe(Surface(plane="eigen", resolution="5"), subject)
    rise = found["loss"] - 4.0
    assert rise[0, 2] == pytest.approx(-LOSS_CHANGE * 4.0, rel=0.02)  # down along x and up along y, alike
    assert rise[2, 0] == pytest.approx(LOSS_CHANGE * 4.0, rel=0.05)
    requested = Surface(plane="eigen", resolution="5", range="0.5")
    assert run_probe(requested, subject)["x"].tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5]
    assert requested.identity(subject)["range"] == ((-0.5, 0.5), (-0.5, 0.5))


@pytest.mark.parametrize(
    ("loss", "slope", "curvature", "expected"),
    [
        (1.0, 0.0, 4.0, 0.1),
        (1.0, 0.8, 4.0, 0.4),  # the stationary point at 0.2 lies half way
        (1.0, 0.0, 1e-9, 1.0),
        (1.0, 0.0, 0.0, 1.0),
        (0.0, 0.0, -4.0, 0.1),
        (float("inf"), 0.0, 4.0, 1.0),
    ],
)
def test_the_reach_along_an_eigenvector(loss: float, slope: float, curvature: float, expected: float) -> None:
    assert half_range(loss, slope, curvature) == expected


def test_the_eigen_plane_weighs_all_samples_equally() -> None:
    matrix = symmetric([8.0, 3.0, -2.0])
    batches = [torch.tensor([[1.0, 0.0]] * 3), torch.tensor([[5.0, 0.0]])]  # mean scale 2
    subject = quadratic(matrix, weight=torch.zeros(1, 3), batches=batches)
    with PlaneEvaluator(subject, _plane(subject, "eigen")) as evaluator:
        assert evaluator.at(0.0, 1.0)["loss"] == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize("kind", ["eigen", "random"])
def test_automatic_batch_norm_has_the_run_key_of_frozen_statistics(kind: str) -> None:
    subject = quadratic(symmetric([3.0, -1.0, 0.5]))
    requested, frozen = (asked(Surface(plane=kind, bn=bn), subject) for bn in ("auto", "frozen"))
    assert requested == frozen
    assert requested["bn"] == "frozen"


@pytest.mark.parametrize("kind", ["sideways", "a.pt", "no/such/run"])
def test_an_unknown_plane_is_rejected(kind: str) -> None:
    with pytest.raises(ValueError, match=f"--plane must be random, eigen, .*, got {kind}"):
        _plane(attention_net(), kind)


def test_missing_checkpoints_and_what_spans_no_plane_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.pt"):
        _plane(attention_net(), f"{tmp_path / 'a.pt'},{tmp_path / 'b.pt'}")
    with pytest.raises(ValueError, match="names 3 checkpoints, expected two"):
        _plane(attention_net(), "a.pt,b.pt,c.pt")
    subject = attention_net()
    for name, scale in (("a", 0.3), ("b", 0.6)):
        torch.save(moved(subject, 1, scale), tmp_path / f"{name}.pt")
    with pytest.raises(ValueError, match="lie on one line"):
        _plane(subject, f"{tmp_path / 'a.pt'},{tmp_path / 'b.pt'}")
    run = _run(tmp_path / "run", [dict(state(subject.model)), moved(subject, 1)])
    with pytest.raises(ValueError, match=r"2 snapshots of .* lie on one line"):
        _plane(subject, str(run))
    with pytest.raises(ValueError, match="--plane eigen needs finite curvature"):
        _plane(quadratic(torch.full((3, 3), torch.nan).double()), "eigen")
    with pytest.raises(ValueError, match="relax --ignore"):
        plane_of(attention_net(), "random", normalize="filter", ignore=".", seed=0)


@pytest.mark.parametrize("recalibrate", [0, 2])
def test_weights_and_buffers_are_restored_bit_for_bit(recalibrate: int) -> None:
    subject = convolution_net()
    kept, modes = state(subject.model), [m.training for m in subject.model.modules()]
    with PlaneEvaluator(subject, _plane(subject, "random"), RunningStatistics(recalibrate=recalibrate)) as evaluator:
        evaluator.at(1.0, -0.3)
        assert not same_state(subject.model, kept)
    assert same_state(subject.model, kept)
    assert [m.training for m in subject.model.modules()] == modes
    assert all(p.grad is None and not p.is_inference() for p in subject.model.parameters())
    torch.autograd.grad(subject.loss(0), list(subject.parameters.values()))  # autograd still works on them


def test_l2_is_that_of_the_moved_weights_by_either_definition() -> None:
    subject = attention_net()
    plane = _plane(subject, "random")
    moves = [
        {n: c * d for n, d in direction.items()} for c, direction in zip((0.7, -0.4), plane.directions, strict=True)
    ]
    weights = [w for name, w in _shifted(subject, *moves).items() if name in subject.parameters]
    with PlaneEvaluator(subject, plane, l2_definition="squared") as evaluator:
        assert evaluator.at(0.7, -0.4)["l2"] == pytest.approx(sum(w.square().sum().item() for w in weights) / 2)
    with PlaneEvaluator(subject, plane, l2_definition="park2022") as evaluator:
        assert evaluator.at(0.7, -0.4)["l2"] == pytest.approx(sum(w.norm().item() for w in weights))


def test_recalibrated_statistics_are_the_plain_average_over_the_first_mini_batches() -> None:
    subject = convolution_net(sizes=(6, 6, 6))
    plane = _plane(subject, "random")
    norm = subject.model.get_submodule("1")
    with PlaneEvaluator(subject, plane, RunningStatistics(recalibrate=2)) as evaluator:
        found = evaluator.at(0.3, 0.2)["loss"]
        convolution = subject.model.get_submodule("0")
        with torch.no_grad():
            maps = [convolution(subject.batch(i)[0]) for i in range(2)]
        mean = torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0)
        variance = torch.stack([m.var((0, 2, 3), correction=1) for m in maps]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)
        with torch.no_grad():
            again = torch.stack([subject.loss(i) for i in range(3)]).mean().item()
    assert found == pytest.approx(again, rel=1e-12)


def test_inner_products_have_the_same_bits_with_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(100_003, generator=generator) for _ in range(2))
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found |= {inner([left], [right]), dot(left, right).item()}
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(left.double() @ right.double()), rel=1e-12)


def test_inner_products_on_a_device_have_the_bits_of_the_cpu_and_few_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(64, 3, 7, 7), *[(64,), (130, 65, 3, 3), (130,), ()] * 20]
    left, right = ([torch.randn(size, generator=generator) for size in sizes] for _ in range(2))
    expected = inner(left, right)
    assert expected == pytest.approx(float(flat(left).double() @ flat(right).double()), rel=1e-12)
    with simulated_cuda() as simulation:
        there = [[tensor.to("cuda") for tensor in tensors] for tensors in (left, right)]
        assert inner(*there) == expected
        vectors = flat(there[0]), flat(there[1])
        for product, given, kernels in ((inner, there, 15), (dot, vectors, 12)):
            before = simulation.operations
            product(*given)
            assert simulation.operations - before <= kernels


def test_an_evaluator_holds_three_copies_of_the_weights_beside_the_model() -> None:
    subject = attention_net()
    evaluator = PlaneEvaluator(subject, _plane(subject, "random"))
    evaluator.at(0.5, 0.5)
    live = {p.data_ptr() for p in subject.model.parameters()}
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensors in (evaluator._weights.original, *vars(evaluator).values())
        if isinstance(tensors, dict)
        for tensor in tensors.values()
        if tensor.data_ptr() not in live
    }
    size = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    assert size < sum(held.values()) <= 3 * size


@pytest.mark.slow
@pytest.mark.parametrize("recalibrate", [0, 2])
def test_a_row_on_a_device_waits_once_with_few_operations_and_has_the_numbers_of_the_cpu(recalibrate: int) -> None:
    def found(device: str) -> list[dict[str, Any]]:
        own = convolution_net(sizes=(6, 6, 6))
        batches = [(x.to(device), y.to(device)) for x, y in (own.batch(i) for i in range(3))]
        subject = Subject(own.model.to(device), batches)
        with PlaneEvaluator(
            subject, _plane(subject, "random"), RunningStatistics(recalibrate=recalibrate)
        ) as evaluator:
            for place in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)):
                evaluator.at(*place)  # passes are recorded and compared
            simulation.waits.clear()
            simulation.operations = 0
            places = iter([(x, y, False) for x in (0.0, 0.5, 0.7) for y in (-0.1, 0.2, 0.3)])
            values = evaluator.evaluate(places)
            first = next(values)
            if device == "cuda":  # the next row was launched before
                assert next(places) == (0.7, 0.2, False)
            return [first, *values][:6]

    with simulated_cuda() as simulation:
        np.testing.assert_equal(found("cpu"), found("cuda"))  # "deviates" is NaN
        assert sum(simulation.waits.values()) == 3  # one transfer a row
        assert simulation.operations <= 8 * (20 if not recalibrate else 100)


def _three(tmp_path: Path) -> tuple[Subject, list[dict[str, Tensor]], str]:
    """A network with batch norm, two others that differ in weights and statistics, and the word for their plane."""
    subject = convolution_net()
    others = [moved(subject, seed, 0.4) for seed in (1, 2)]
    for name, weights in zip("ab", others, strict=True):
        torch.save(weights, tmp_path / f"{name}.pt")
    return subject, others, f"{tmp_path / 'a.pt'},{tmp_path / 'b.pt'}"


@pytest.mark.parametrize("resolution", ["7", "10,5"])
def test_a_plane_through_checkpoints_has_their_losses_also_where_batch_norm_differs(
    tmp_path: Path, resolution: str
) -> None:
    subject, others, word = _three(tmp_path)
    kept = state(subject.model)
    found = run_probe(Surface(resolution=resolution, plane=word), subject)
    x, y = found["x"].tolist(), found["y"].tolist()
    assert found["facts"]["statistics"] == "interpolated between the checkpoints"
    for (a, b), weights in zip(((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), (kept, *others), strict=True):
        assert found["loss"][x.index(a), y.index(b)] == pytest.approx(losses_with(subject, weights).mean(), rel=1e-13)
    np.testing.assert_allclose(
        found["path_loss"], [losses_with(subject, w).mean() for w in (kept, *others)], rtol=1e-13
    )
    np.testing.assert_allclose(found["path_excess"], 0.0, atol=1e-13)
    assert np.isfinite(found["loss"]).all()  # beyond the triangle too, where an extrapolated variance is negative
    assert same_state(subject.model, kept)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 21, 50, 51])
def test_the_default_range_between_checkpoints_has_both_on_its_grid(count: int) -> None:
    low, high = through_checkpoints(count)
    found = ticks(low, high, count).tolist()
    assert len(found) == count
    assert {0.0, 1.0} <= set(found)
    if count >= 4:
        assert low < 0.0
        assert high > 1.0


def test_between_three_checkpoints_statistics_are_their_weighted_mean(tmp_path: Path) -> None:
    subject, others, word = _three(tmp_path)
    plane = plane_of(subject, word, normalize="filter", ignore="", seed=0)
    own = state(subject.model)
    first, second = plane.ends
    weights_in_place = WeightsInPlace(subject, first)

    def move_to(x: float, y: float) -> None:
        share, second_share = barycentric(x, y)
        weights_in_place.interpolate(first, share, second, second_share)

    assert set(first) == {"1.running_mean", "1.running_var"}
    # Outside, a share below 0 counts as 0: (1.5, 1.5) has none of the first and halves of the others.
    points = {(0.2, 0.3): (0.5, 0.2, 0.3), (1.5, 1.5): (0.0, 0.5, 0.5), (-1.0, 0.0): (1.0, 0.0, 0.0)}
    for (x, y), shares in points.items():
        move_to(x, y)
        for name in plane.ends[0]:
            mean = sum(s * w[name] for s, w in zip(shares, (own, *others), strict=True))
            torch.testing.assert_close(subject.model.state_dict()[name], mean, rtol=1e-14, atol=0.0)
    for (x, y), weights in {(1.0, 0.0): others[0], (0.0, 1.0): others[1], (0.0, 0.0): own}.items():
        move_to(x, y)
        assert all(torch.equal(subject.model.state_dict()[name], weights[name]) for name in plane.ends[0])


def test_frozen_statistics_of_a_plane_through_checkpoints_are_stored_with_their_excess_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject, others, word = _three(tmp_path)
    own = state(subject.model)
    caplog.set_level("INFO")
    found = run_probe(Surface(resolution="4", plane=word, bn="frozen"), subject)
    statistics = {name: own[name] for name in ("1.running_mean", "1.running_var")}
    frozen, itself = (
        np.array([losses_with(subject, {**w, **kept}).mean() for w in (own, *others)]) for kept in (statistics, {})
    )
    assert abs(frozen - itself)[1:].min() > 1e-3
    np.testing.assert_allclose(found["path_excess"], frozen - itself, atol=1e-13)
    assert found["facts"]["statistics"] == "frozen"
    assert f"a {frozen[1]:.4g} (its own {itself[1]:.4g})" in caplog.text


def test_interpolated_statistics_change_the_run_key_only_where_checkpoints_differ_in_them(tmp_path: Path) -> None:
    subject, _, word = _three(tmp_path)
    assert (Surface().bn, Surface(plane="eigen").bn, Surface(plane="A.pt,B.pt").bn) == ("frozen", "frozen", "auto")
    assert asked(Surface(), subject)["bn"] == asked(Surface(bn="frozen"), subject)["bn"] == "frozen"
    resolved = [asked(Surface(plane=word, bn=bn), subject)["bn"] for bn in ("auto", "interpolate", "frozen")]
    assert resolved == ["interpolate", "interpolate", "frozen"]
    with pytest.raises(OptionError, match="--bn interpolate needs a plane through checkpoints"):
        Surface(bn="interpolate")


def test_losses_of_checkpoints_have_the_units_of_the_chosen_loss(tmp_path: Path) -> None:
    subject, _, word = _three(tmp_path)
    other = replace(subject, losses=lambda outputs, targets: cross_entropy(outputs, targets).square())
    plan = Surface(resolution=3, plane=word).plan(other)
    assert {plan.labels[name][0].units for name in ("path_loss", "path_excess")} == {"loss"}
    plan = Line(resolution=3, along=word.split(",")[0]).plan(other)
    assert {plan.labels[name][0].units for name in ("end_loss", "end_excess")} == {"loss"}

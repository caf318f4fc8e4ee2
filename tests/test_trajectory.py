"""The trajectory probe on trajectories of known shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import convolution_net, quadratic, run_probe, same_state, state
from torch import Tensor

from landscape.probes import PROBES
from landscape.probes.trajectory import Trajectory
from landscape.subject import batchnorm
from landscape.subject.sample_statistics import per_sample
from landscape.subject.subject import Subject
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import plane_of
from landscape.weight_space.weight_differences import principal_axes


def _point(*coordinates: float) -> Tensor:
    return torch.tensor([coordinates], dtype=torch.float64)


def _path(folder: Path, points: Sequence[Tensor]) -> tuple[Subject, Trajectory]:
    """A run whose only weight visits the points, on the bowl |w|^2 / 2."""
    subject = quadratic(torch.eye(points[0].numel()).double(), weight=points[-1])
    for epoch, point in enumerate(points):
        torch.save({**state(subject.model), "weight": point}, folder / f"epoch_{epoch:03}.pt")
    return subject, Trajectory(run=str(folder))


def test_the_help_says_that_the_polar_figure_is_easy_to_misread() -> None:
    assert "in polar coordinates, easy to misread" in PROBES["trajectory"].help


def test_a_straight_path_has_no_angle_and_no_distance_from_its_plane(tmp_path: Path) -> None:
    start, end = _point(4, -2, 1, 3), _point(1, 1, 1, 0)
    points = [end + share * (start - end) for share in (1.0, 0.75, 0.1, 0.0)]
    found = run_probe(*_path(tmp_path, points)[::-1])
    np.testing.assert_allclose(found["radius"], [1, 0.75, 0.1, 0], atol=1e-12)
    np.testing.assert_allclose(found["angle"][:-1], 0.0, atol=1e-7)  # of rounding: arccos(1 - 1e-16) is 1e-8
    np.testing.assert_allclose(found["off_plane"], 0.0, atol=1e-6)
    np.testing.assert_allclose(found["explained_variance"], [1, 0], atol=1e-12)


def test_a_path_around_a_corner_has_the_angles_of_its_geometry(tmp_path: Path) -> None:
    points = [_point(2, 0, 0), _point(2, 2, 0), _point(0, 2, 0), _point(-1, 0, 0), _point(0, 0, 0)]
    found = run_probe(*_path(tmp_path, points)[::-1])
    np.testing.assert_allclose(found["angle"][:-1], [0, np.pi / 4, np.pi / 2, np.pi], atol=1e-12)
    np.testing.assert_allclose(found["radius"], [1, 2**0.5, 1, 0.5, 0], atol=1e-12)
    assert (found["radius"][0], found["angle"][0], found["radius"][-1]) == (1.0, 0.0, 0.0)
    assert np.isnan(found["angle"][-1])


def test_principal_coordinates_are_those_of_the_svd_of_the_path(tmp_path: Path) -> None:
    draws = torch.randn(6, 1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    subject, probe = _path(tmp_path, list(torch.cumsum(draws, dim=0)))
    found = run_probe(probe, subject)
    path = np.cumsum(draws[:, 0].numpy(), axis=0)
    centred = path - path.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    for name, axis in zip(("pc1", "pc2"), axes, strict=False):
        expected = (path - path[-1]) @ axis
        np.testing.assert_allclose(found[name], expected * np.sign(found[name] @ expected), atol=1e-10)
    np.testing.assert_allclose(found["explained_variance"], (singular**2 / (singular**2).sum())[:2])
    left = (path - path[-1]) @ (np.eye(12) - axes[:2].T @ axes[:2])
    np.testing.assert_allclose(found["off_plane"], np.linalg.norm(left, axis=1), atol=1e-8)


def test_the_loss_is_that_of_each_snapshot_with_its_own_statistics(tmp_path: Path) -> None:
    subject = convolution_net(sizes=(6, 5))
    states, losses = [], []
    for epoch in range(3):
        with torch.no_grad():
            for tensor in subject.model.state_dict().values():
                tensor.add_(0.1 if tensor.is_floating_point() else 1)  # weights, statistics and counters
        states.append(state(subject.model))
        losses.append(per_sample(subject)[0].numpy())
        torch.save(states[-1], tmp_path / f"epoch_{epoch}.pt")
    found = run_probe(Trajectory(run=str(tmp_path)), subject)
    np.testing.assert_allclose(found["loss"], [loss.mean() for loss in losses], rtol=1e-13)
    np.testing.assert_allclose(found["loss_se"], [loss.std(ddof=1) / 11**0.5 for loss in losses], rtol=1e-12)
    drift = 0.1 * subject.size**0.5
    np.testing.assert_allclose(np.sqrt(np.diag(found["gram"])), [2 * drift, drift, 0], rtol=1e-12)  # parameters only


def test_on_the_plane_the_loss_is_that_of_the_projected_weights(tmp_path: Path) -> None:
    draws = torch.randn(6, 1, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    subject, probe = _path(tmp_path, list(torch.cumsum(draws, dim=0)))
    found = run_probe(probe, subject)
    path = np.cumsum(draws[:, 0].numpy(), axis=0)
    _, _, axes = np.linalg.svd(path - path.mean(axis=0), full_matrices=False)
    shown = path[-1] + (path - path[-1]) @ axes[:2].T @ axes[:2]
    np.testing.assert_allclose(found["loss"], (path**2).sum(axis=1) / 2, rtol=1e-12)
    np.testing.assert_allclose(found["plane_loss"], (shown**2).sum(axis=1) / 2, rtol=1e-12)
    np.testing.assert_allclose(found["plane_excess"], found["plane_loss"] - found["loss"], atol=1e-12)
    assert found["plane_excess"][-1] == 0.0  # the final weights lie on it


def test_the_loss_on_the_plane_is_that_of_the_surface_of_the_run(tmp_path: Path) -> None:
    subject = convolution_net(sizes=(6, 5))
    for epoch in range(4):
        with torch.no_grad():
            for k, tensor in enumerate(subject.parameters.values()):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9 * epoch + k)))
        torch.save(state(subject.model), tmp_path / f"epoch_{epoch}.pt")
    found = run_probe(Trajectory(run=str(tmp_path)), subject)
    plane = plane_of(subject, str(tmp_path), normalize="filter", ignore="", seed=0)
    with PlaneEvaluator(subject, plane) as evaluator:
        points = [evaluator.at(x, y) for x, y in zip(found["pc1"], found["pc2"], strict=True)]
    for name, other in {"plane_loss": "loss", "plane_loss_se": "loss_se", "plane_accuracy": "accuracy"}.items():
        np.testing.assert_allclose(found[name], [point[other] for point in points], rtol=1e-10)


def test_the_excess_over_the_snapshot_has_a_paired_error(tmp_path: Path) -> None:
    samples = torch.tensor([[1.0, 5.0], [3.0, -9.0], [0.5, 2.0], [2.0, 0.0]])  # scale, offset
    weights = [_point(3, 1, 2), _point(2, 4, 0), _point(0, 1, -1), _point(1, 1, 1)]
    subject = quadratic(torch.eye(3).double(), weight=weights[-1], batches=[samples[:3], samples[3:]])
    for epoch, point in enumerate(weights):
        torch.save({**state(subject.model), "weight": point}, tmp_path / f"epoch_{epoch}.pt")
    found = run_probe(Trajectory(run=str(tmp_path)), subject)
    scale = samples[:, 0].double().numpy()
    gap = found["plane_excess"] / scale.mean()  # the offsets, common to both, are gone
    assert np.abs(gap).max() > 0.01
    np.testing.assert_allclose(found["plane_excess_se"], np.abs(gap) * scale.std(ddof=1) / 2, rtol=1e-9, atol=1e-12)


def test_statistics_on_the_plane_are_the_final_ones_or_refreshed(tmp_path: Path) -> None:
    subject = convolution_net(sizes=(6, 5))
    for epoch in range(2):  # a straight line: the plane passes through both
        with torch.no_grad():
            for tensor in subject.model.state_dict().values():
                tensor.add_(0.3 if tensor.is_floating_point() else 1)
        torch.save(state(subject.model), tmp_path / f"epoch_{epoch}.pt")
    final = state(subject.model)
    first = torch.load(tmp_path / "epoch_0.pt", weights_only=True)
    buffers = {name for name, _ in subject.model.named_buffers()}
    for bn, count in (("frozen", 0), ("recalibrate:2", 2)):
        found = run_probe(Trajectory(run=str(tmp_path), bn=bn), subject)
        subject.model.load_state_dict({name: (final if name in buffers else first)[name] for name in final})
        if count:
            batchnorm.refresh(subject, count)
        assert found["plane_loss"][0] == pytest.approx(per_sample(subject)[0].mean().item(), rel=1e-10)
        assert abs(found["plane_excess"][0]) > 1e-3
        subject.model.load_state_dict(final)


def test_a_missing_run_and_one_of_another_architecture_are_rejected_before_anything_is_measured(tmp_path: Path) -> None:
    _, probe = _path(tmp_path, [_point(3, 1), _point(2, 2)])
    with pytest.raises(ValueError, match=r"epoch_001.pt has another architecture: weight is \(1, 2\), expected"):
        probe.plan(quadratic(torch.eye(3).double()))
    with pytest.raises(ValueError, match="give RUN_DIR"):
        Trajectory().plan(quadratic(torch.eye(2).double()))


def test_the_present_weights_do_not_matter_and_are_restored(tmp_path: Path) -> None:
    subject, probe = _path(tmp_path, [_point(3, 1), _point(2, 2), _point(0, 1)])
    expected = run_probe(probe, subject)
    elsewhere = quadratic(torch.eye(2).double(), weight=_point(7, 7))
    kept = state(elsewhere.model)
    found = run_probe(probe, elsewhere)
    assert same_state(elsewhere.model, kept)
    for name in ("radius", "angle", "loss", "pc1", "off_plane"):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("units", [0, 1, 2, 3])
def test_a_half_finished_result_has_the_summaries_that_its_inner_products_allow(tmp_path: Path, units: int) -> None:
    subject, probe = _path(tmp_path, [_point(3, 1), _point(2, 2), _point(1, 0), _point(0, 1)])
    whole, part = run_probe(probe, subject), run_probe(probe, subject, units=units)
    known = np.arange(4) < units
    for name in ("radius", "angle"):
        np.testing.assert_allclose(part[name], np.where(known, whole[name], np.nan), atol=1e-12)
    assert "pc1" not in part


def test_labels_are_epochs_and_file_names(tmp_path: Path) -> None:
    subject, probe = _path(tmp_path, [_point(3, 1), _point(2, 2), _point(1, 0)])
    plan = probe.plan(subject)
    assert plan.labels["epoch"][1].tolist() == [0.0, 1.0, 2.0]
    assert plan.labels["name"][1].tolist() == ["epoch_000", "epoch_001", "epoch_002"]


# --- Principal axes from a Gram matrix against numpy's SVD of the vectors themselves ---


def _vectors(count: int = 7, size: int = 40, *, seed: int = 0) -> np.ndarray:
    """A path that ends at the origin, as differences from the last snapshot do."""
    steps = np.random.default_rng(seed).normal(size=(count, size)) * np.linspace(3, 1, size)
    path = np.cumsum(steps, axis=0)
    difference: np.ndarray = path - path[-1]
    return difference


def test_the_end_lies_at_the_origin_and_signs_are_fixed() -> None:
    vectors = _vectors()
    found, mirrored = (principal_axes(v @ v.T) for v in (vectors, -vectors))
    np.testing.assert_allclose(found.coordinates[:, -1], 0.0, atol=1e-9)
    assert (found.coordinates[[0, 1], np.abs(found.coordinates).argmax(axis=1)] > 0).all()
    np.testing.assert_allclose(found.coordinates, mirrored.coordinates, atol=1e-9)


def test_axes_beyond_the_movement_are_zero() -> None:
    found = principal_axes(np.zeros((3, 3)))
    assert not found.coefficients.any()
    assert found.explained.tolist() == [0.0, 0.0]
    assert found.off_plane.tolist() == [0.0, 0.0, 0.0]
    vectors = _vectors(2)
    found = principal_axes(vectors @ vectors.T, 4)
    assert found.coefficients.shape == (4, 2)
    assert not found.coefficients[1:].any()
    np.testing.assert_allclose(found.explained, [1, 0, 0, 0], atol=1e-12)

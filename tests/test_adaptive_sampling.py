"""Previews: which points are evaluated, how the others are interpolated, and when every point is needed."""

from __future__ import annotations

import numpy as np
import pytest

from landscape.weight_space import adaptive_sampling
from landscape.weight_space.adaptive_sampling import Design, interpolate_missing, step

AXES = np.linspace(-1, 1, 51), np.linspace(-2, 1, 45)
SMALL = Design(coarse=5, step=10, points=65, hold_outs=59)


def valley(axes: tuple[np.ndarray, np.ndarray] = AXES) -> np.ndarray:
    """A loss over two decades, off the centre and not symmetric."""
    x, y = np.meshgrid(*axes, indexing="ij")
    return np.asarray(np.exp(3 * np.tanh(x**2 + 1.5 * (y - 0.1) ** 2 + 0.4 * np.sin(3 * x) * y) - 2 + 2 * x**2))


def walked(
    loss: np.ndarray, *, axes: tuple[np.ndarray, np.ndarray] = AXES, seed: int = 0, tolerance: float = 0.05,
    stop: int = 10**9, design: Design = adaptive_sampling.DESIGN,
) -> tuple[np.ndarray, adaptive_sampling.Step]:  # fmt: skip
    """The points evaluated by following the steps, at most `stop` points of each; and the last step."""
    evaluated = np.zeros(loss.shape, dtype=bool)
    while True:
        found = step(axes, np.where(evaluated, loss, np.nan), evaluated, tolerance=tolerance, seed=seed, design=design)
        if not len(found.points):
            return evaluated, found
        assert not evaluated.ravel()[found.points].any()
        evaluated.ravel()[found.points[:stop]] = True


@pytest.mark.slow
def test_a_smooth_surface_needs_few_points_and_the_hold_outs_bound_its_error() -> None:
    loss = valley()
    assert loss.max() / loss.min() > 100
    evaluated, last = walked(loss)
    assert evaluated.sum() == adaptive_sampling.DESIGN.total == 340
    assert not last.fallback
    found = interpolate_missing(AXES, {"loss": np.where(evaluated, loss, np.nan)}, evaluated)["loss"]
    error = np.abs(found / loss - 1)[~evaluated]
    assert np.quantile(error, 0.95) <= min(0.02, last.error)
    np.testing.assert_array_equal(found[evaluated], loss[evaluated])


@pytest.mark.campaign
def test_the_bound_covers_95_percent_of_the_errors_for_19_of_20_draws_of_hold_outs() -> None:
    axes = np.linspace(-1, 1, 31), np.linspace(-1, 1, 29)
    loss, covered, bounds = valley(axes), [], set()
    for seed in range(20):
        evaluated, last = walked(loss, axes=axes, seed=seed, tolerance=10.0, design=SMALL)
        found = interpolate_missing(axes, {"loss": np.where(evaluated, loss, np.nan)}, evaluated)["loss"]
        covered.append(last.error >= np.quantile(np.abs(found / loss - 1)[~evaluated], 0.95))
        bounds.add(last.error)
    assert np.mean(covered) >= 0.9
    assert len(bounds) > 10


@pytest.mark.slow
def test_a_rough_surface_is_detected_and_evaluated_everywhere() -> None:
    loss = valley() * np.exp(0.3 * np.random.default_rng(0).standard_normal((51, 45)))
    evaluated, last = walked(loss, design=SMALL)
    assert evaluated.all()
    assert last.error > 0.05
    assert "hold-outs err by up to" in last.fallback


def test_a_loss_that_is_not_finite_is_not_interpolated() -> None:
    loss = valley()
    loss[-1, -1] = np.inf
    evaluated, last = walked(loss)
    assert evaluated.all()
    assert "not finite" in last.fallback


@pytest.mark.parametrize("shape", [(2, 400), (18, 18), (3, 3)])
def test_grids_with_nothing_to_save_are_evaluated_everywhere(shape: tuple[int, int]) -> None:
    axes = np.linspace(-1, 1, shape[0]), np.linspace(-1, 1, shape[1])
    assert walked(np.ones(shape), axes=axes)[0].all()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 7])
def test_interrupted_rounds_choose_the_same_points(stop: int) -> None:
    axes = np.linspace(-1, 1, 25), np.linspace(-1, 1, 21)
    loss = valley(axes)
    whole, last = walked(loss, axes=axes, design=SMALL, tolerance=1.0)
    halting, same = walked(loss, axes=axes, design=SMALL, tolerance=1.0, stop=stop)
    np.testing.assert_array_equal(halting, whole)
    assert same.error == last.error


def test_earlier_rounds_do_not_depend_on_values_of_later_ones() -> None:
    axes = np.linspace(-1, 1, 25), np.linspace(-1, 1, 21)
    loss = valley(axes)
    evaluated, _ = walked(loss, axes=axes, design=SMALL, tolerance=1.0)
    again = step(axes, loss, evaluated, tolerance=1.0, seed=0, design=SMALL)
    everything = step(axes, loss, np.ones_like(evaluated), tolerance=1.0, seed=0, design=SMALL)
    assert again.error == everything.error


@pytest.mark.slow
def test_a_quadratic_l2_is_reproduced_exactly_and_accuracies_stay_between_0_and_1() -> None:
    x, y = np.meshgrid(*AXES, indexing="ij")
    evaluated, _ = walked(valley(), design=SMALL, tolerance=9.0)
    l2, accuracy = 40 + x + 3 * x**2 - x * y + 2 * y**2, np.clip(2 - x**2 - y**2, 0, 1)
    known = {"l2": l2, "accuracy": accuracy, "rise_se": 0.1 * np.hypot(x, y)}
    found = interpolate_missing(
        AXES, {name: np.where(evaluated, values, np.nan) for name, values in known.items()}, evaluated
    )
    np.testing.assert_allclose(found["l2"], l2, rtol=1e-12)
    assert 0 <= found["accuracy"].min() <= found["accuracy"].max() <= 1
    assert np.isfinite(found["rise_se"]).all()  # zero at the centre, where a logarithm is not


def test_interpolating_the_log_loss_beats_interpolating_the_loss() -> None:
    loss = valley()
    evaluated, _ = walked(loss, design=SMALL, tolerance=9.0)
    grid = adaptive_sampling.coordinates(AXES)
    at, rest = grid[evaluated.ravel()], grid[~evaluated.ravel()]
    plain = adaptive_sampling._radial(at, loss[evaluated], rest)
    logarithmic = adaptive_sampling.interpolated(at, loss[evaluated], rest)
    truth = loss[~evaluated]
    assert np.abs(logarithmic / truth - 1).max() < np.abs(plain / truth - 1).max()

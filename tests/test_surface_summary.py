"""Heights, curvature, convexity and minima of surfaces on a grid, against closed forms and brute force."""

from __future__ import annotations

import numpy as np
import pytest

from landscape.statistics.surface_summary import curvature, minima, non_convex, summarise
from landscape.weight_space import adaptive_sampling
from landscape.weight_space.adaptive_sampling import Design, interpolate_missing, step

X, Y = np.linspace(-1, 1, 41), np.linspace(-1.5, 1, 51)
GRID_X, GRID_Y = np.meshgrid(X, Y, indexing="ij")


def quadratic(xx: float, xy: float, yy: float) -> np.ndarray:
    return np.asarray(2 + GRID_X - 0.5 * GRID_Y + xx * GRID_X**2 / 2 + xy * GRID_X * GRID_Y + yy * GRID_Y**2 / 2)


def test_the_curvature_of_a_quadratic_is_its_hessian() -> None:
    found = curvature(X, Y, quadratic(3.0, -1.0, 0.5))
    np.testing.assert_allclose(found, [3.0, -1.0, 0.5], atol=1e-9)


def test_the_errors_of_a_surface_are_those_of_what_its_samples_have_in_common() -> None:
    """Samples with a slope and a bowl of their own: the slopes cancel on a circle and in second derivatives."""
    draw = np.random.default_rng(0)
    parts = (
        1
        + np.multiply.outer(GRID_X, draw.normal(size=16))
        + np.multiply.outer(GRID_X**2 + 2 * GRID_Y**2, scales := draw.lognormal(size=16))
    )
    error = scales.std(ddof=1) / 4
    found = summarise({
        "x": X, "y": Y, "done": np.ones(GRID_X.shape), "loss": parts.mean(axis=2), "loss_part": parts,
        "radius": np.array([0.5, 2.0]),
    })  # fmt: skip
    np.testing.assert_allclose(found["curvature"], [2 * scales.mean(), 0.0, 4 * scales.mean()], atol=1e-9)
    np.testing.assert_allclose(found["curvature_se"], [2 * error, 0.0, 4 * error], atol=1e-9)
    assert found["height_se"][0] / found["height"][0] == pytest.approx(error / scales.mean(), rel=1e-9)
    assert np.isnan([found["height"][1], found["height_se"][1]]).all()  # beyond the grid


@pytest.mark.parametrize("change", ["edge", "hole", "narrow"])
def test_curvature_is_unknown_where_the_centre_is_not_there(change: str) -> None:
    loss, x = quadratic(1.0, 0.0, 1.0), X
    if change == "edge":
        x = X + 1
    elif change == "hole":
        loss[20, 30] = np.inf
    found = curvature(x[:4], Y, loss[:4]) if change == "narrow" else curvature(x, Y, loss)
    assert np.isnan(found).all()


@pytest.mark.parametrize(
    ("hessian", "share"),
    [((1.0, 0.0, 2.0), 0.0), ((1.0, 1.5, 1.0), 1.0), ((-1.0, 0.0, -1.0), 1.0), ((1.0, 1.0, 1.0), 0.0),
     ((0.0, 0.0, 0.0), 0.0)],
)  # fmt: skip
def test_the_share_of_non_convex_cells_of_quadratics(hessian: tuple[float, float, float], share: float) -> None:
    assert non_convex(X, Y, quadratic(*hessian)) == share


def test_the_share_of_non_convex_cells_of_a_cosine_is_where_it_bends_down() -> None:
    x = np.linspace(0, 2 * np.pi, 401)
    loss = np.repeat(-np.cos(x)[:, None], 3, axis=1)  # convex where cos x > 0
    assert non_convex(x, np.arange(3.0), loss) == pytest.approx(0.5, abs=2 / 400)


def test_cells_beside_a_value_that_is_not_finite_do_not_count() -> None:
    loss = quadratic(1.0, 0.0, 1.0)
    loss[0, :] = np.inf
    assert non_convex(X, Y, loss) == 0.0
    assert np.isnan(non_convex(X, Y, np.full((41, 51), np.nan)))


def test_two_wells_have_the_persistence_of_the_pass_between_them() -> None:
    x = np.linspace(-1.5, 1.5, 61)
    loss = (x[:, None] ** 2 - 1) ** 2 + 0.1 * x[:, None] + np.linspace(-1, 1, 21)[None, :] ** 2
    lowest, other = minima(loss)
    assert lowest.saddle is None
    assert np.isinf(lowest.persistence)
    assert x[lowest.at[0]] == pytest.approx(-1.0, abs=0.05)
    assert x[other.at[0]] == pytest.approx(1.0, abs=0.05)
    assert other.saddle is not None
    assert other.persistence == loss[other.saddle] - loss[other.at]
    assert loss[other.saddle] == pytest.approx(loss[:, 10][20:40].max())


def brute_force(loss: np.ndarray) -> list[float]:
    """Finite persistences by flooding at every level: components of the sublevel sets, each named by its lowest."""
    from scipy.ndimage import label

    alive: dict[tuple[int, ...], float] = {}
    found = []
    for level in np.sort(loss.ravel()):
        labels, count = label(loss <= level)
        bottoms = set()
        for k in range(1, count + 1):
            inside = np.where(labels == k, loss, np.inf)
            bottoms.add(tuple(int(i) for i in np.unravel_index(inside.argmin(), loss.shape)))
        for bottom in set(alive) - bottoms:
            found.append(level - alive.pop(bottom))
        for bottom in bottoms:
            alive.setdefault(bottom, loss[bottom])
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_persistences_are_those_of_the_sublevel_sets(seed: int) -> None:
    loss = np.random.default_rng(seed).standard_normal((9, 7))
    found = minima(loss)
    np.testing.assert_allclose([minimum.persistence for minimum in found[1:]], brute_force(loss))


@pytest.mark.parametrize("kind", ["normal", "ties", "infinite"])
def test_persistences_agree_with_gudhi_on_fifty_grids(kind: str) -> None:
    gudhi = pytest.importorskip("gudhi")
    for seed in range(50):
        generator = np.random.default_rng(seed)
        loss = generator.standard_normal(generator.integers(2, 24, size=2))
        if kind == "ties":
            loss = np.round(2 * loss)
        if kind == "infinite":
            loss[generator.random(loss.shape) < 0.2] = np.inf
        complex_ = gudhi.CubicalComplex(vertices=loss)
        complex_.compute_persistence()
        born, died = complex_.persistence_intervals_in_dimension(0).reshape(-1, 2).T
        lasting = np.isfinite(born) & (died > born)
        expected = np.sort((died - born)[lasting])[::-1]
        np.testing.assert_allclose([minimum.persistence for minimum in minima(loss)], expected)


def test_a_plateau_is_one_minimum_and_infinite_values_are_none() -> None:
    loss = np.ones((4, 5))
    assert len(minima(loss)) == 1
    loss[:, 2] = np.inf
    assert len(minima(loss)) == 2  # two basins that never meet
    assert minima(np.full((3, 3), np.nan)) == []


# --- Previews: which points are evaluated, how the others are interpolated, and when every point is needed ---


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

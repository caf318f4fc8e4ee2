"""Heights, curvature, convexity and minima of surfaces on a grid, against closed forms and brute force."""

from __future__ import annotations

import numpy as np
import pytest

from landscape.statistics.surface_summary import curvature, height, minima, non_convex

X, Y = np.linspace(-1, 1, 41), np.linspace(-1.5, 1, 51)
GRID_X, GRID_Y = np.meshgrid(X, Y, indexing="ij")


def quadratic(xx: float, xy: float, yy: float) -> np.ndarray:
    return np.asarray(2 + GRID_X - 0.5 * GRID_Y + xx * GRID_X**2 / 2 + xy * GRID_X * GRID_Y + yy * GRID_Y**2 / 2)


def test_the_curvature_of_a_quadratic_is_its_hessian() -> None:
    found, errors = curvature(X, Y, quadratic(3.0, -1.0, 0.5), np.full((41, 51), 0.01))
    np.testing.assert_allclose(found, [3.0, -1.0, 0.5], atol=1e-9)
    assert (errors > 0).all()


def test_the_error_of_curvature_and_height_is_that_of_points_that_err_together() -> None:
    """Samples whose losses are random multiples of one shape: the rise is perfectly correlated over the plane."""
    shape = GRID_X**2 + 2 * GRID_Y**2
    scales = np.random.default_rng(0).lognormal(size=100)
    mean, error = scales.mean(), scales.std(ddof=1) / 10
    found, errors = curvature(X, Y, mean * shape, error * shape)
    np.testing.assert_allclose(found, [2 * mean, 0.0, 4 * mean], atol=1e-9)
    assert errors[0] >= 2 * error * (1 - 1e-9)
    assert errors[2] >= 4 * error * (1 - 1e-9)
    rise, rise_se = height(X, Y, mean * shape, 0.5, rise_se=error * shape)
    assert rise_se / rise == pytest.approx(error / mean, rel=1e-9)  # all weights have one sign: nothing is lost


@pytest.mark.parametrize("change", ["edge", "hole", "narrow"])
def test_curvature_is_unknown_where_the_centre_is_not_there(change: str) -> None:
    loss, x = quadratic(1.0, 0.0, 1.0), X
    if change == "edge":
        x = X + 1
    elif change == "hole":
        loss[20, 30] = np.inf
    found = curvature(x[:4], Y, loss[:4], loss[:4]) if change == "narrow" else curvature(x, Y, loss, loss)
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

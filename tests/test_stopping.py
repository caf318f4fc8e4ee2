"""When a search stops: its values are right to the tolerance, and none further out is left unseen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from analytic import symmetric
from torch import Tensor

from landscape.curvature import stopping
from landscape.curvature.lanczos import lanczos
from landscape.curvature.stopping import RitzPairs, StoppingRule, Which
from landscape.products.vectors import random_unit

N = 120


def _tridiagonal(values: np.ndarray, start: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients alpha and beta of Lanczos on a diagonal operator, (steps,) each."""
    basis, alpha, beta = [start / np.linalg.norm(start)], [], []
    for _ in range(steps):
        w = values * basis[-1]
        alpha.append(w @ basis[-1])
        for _ in range(2):
            w = w - np.stack(basis).T @ (np.stack(basis) @ w)
        beta.append(np.linalg.norm(w))
        basis.append(w / beta[-1])
    return np.array(alpha), np.array(beta)


def _ritz(alpha: np.ndarray, beta: np.ndarray, size: int) -> RitzPairs:
    theta, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1))
    return RitzPairs(theta, beta[-1] * vectors[-1], vectors[0], size, 1e-13)


def _product(values: list[float], seed: int) -> Callable[[Tensor], Tensor]:
    matrix = symmetric(values, seed)
    return lambda vector: matrix @ vector


def _start(seed: int, n: int) -> Tensor:
    return random_unit(n, seed, device=torch.device("cpu"), dtype=torch.float64)


def test_hidden_components_are_those_of_the_lanczos_polynomials() -> None:
    generator = np.random.default_rng(0)
    alpha, beta = _tridiagonal(generator.normal(size=N), generator.normal(size=N), 9)
    points = np.array([-3.1, -0.3, 0.01, 2.7, 5.0])
    polynomials = [np.ones(5), (points - alpha[0]) / beta[0]]
    for j in range(1, 9):
        polynomials.append(((points - alpha[j]) * polynomials[-1] - beta[j - 1] * polynomials[-2]) / beta[j])
    expected = np.sqrt(N / np.square(polynomials).sum(axis=0))
    np.testing.assert_allclose(_ritz(alpha, beta, N).hidden(points), expected, rtol=1e-9)


@pytest.mark.parametrize("steps", [4, 8, 12])
def test_no_eigenvector_has_more_of_the_start_than_it_can_hide(steps: int) -> None:
    generator = np.random.default_rng(1)
    values = np.append([3.0, -2.9, 2.5, 2.0], 0.5 * generator.normal(size=N - 4))
    start = generator.normal(size=N)
    pairs = _ritz(*_tridiagonal(values, start, steps), N)
    components = np.abs(start) * np.sqrt(N) / np.linalg.norm(start)
    assert (components <= pairs.hidden(values) * (1 + 1e-6)).all()


def test_the_gap_is_honest_about_a_neighbour_that_is_not_converged() -> None:
    values, couplings = np.array([1.0, 4.0, 5.0]), np.array([0.1, 0.9, 0.1])
    pairs = RitzPairs(values, couplings, None, N, 1e-13)
    # 5: its neighbour may be anywhere in 4 +- 0.9, so the gap is 0.1; 4: the gap to 5 is 0.9; 1: to 4 it is 2.1
    np.testing.assert_allclose(pairs.errors, [0.1**2 / 2.1, 0.9, 0.1], rtol=1e-12)
    overlapping = RitzPairs(values, np.array([0.1, 1.5, 0.1]), None, N, 1e-13)
    np.testing.assert_allclose(overlapping.errors[2], 0.1)  # no gap: the residual


def test_rounding_leaves_an_error_and_a_residual() -> None:
    pairs = RitzPairs(np.array([-1.0, 0.0, 10.0]), np.zeros(3), None, N, 1e-6)
    np.testing.assert_allclose(pairs.residuals, 1e-5)
    np.testing.assert_allclose(pairs.errors, 1e-6)
    rule = StoppingRule(3, tol=1e-4)
    assert rule.converged(pairs.values, pairs.residuals, pairs.errors).tolist() == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["LM", "LA", "SA", "both"])
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
def test_values_are_right_to_the_tolerance_and_cost_no_more_than_a_small_residual(which: Which, tol: float) -> None:
    cheap = dear = 0
    for seed in range(6):
        values = sorted([9.0, -8.9, 8.5, 5.0, 4.6, -3.0] + [0.03 * i - 1.5 for i in range(100)])
        order = {"LA": values[::-1][:3], "SA": values[:3], "both": values[::-1][:3] + values[:3]}
        expected = order.get(which, [9.0, -8.9, 8.5])
        found = lanczos(_product(values, seed), _start(seed, 106), 3, which=which, tol=tol)
        np.testing.assert_allclose(found.values, expected, rtol=tol)
        assert found.converged.all()
        assert (found.errors <= tol * np.abs(found.values)).all()
        assert (np.abs(found.values - expected) <= found.errors + 1e-12).all()
        cheap += found.products
        dear += lanczos(_product(values, seed), _start(seed, 106), 3, which=which, tol=None, tol_residual=tol).products
    # Where a loose tolerance is met early, what may be hidden decides in both cases.
    assert cheap <= dear if tol == 1e-2 else cheap < dear


def test_a_residual_is_asked_for_instead_or_in_addition() -> None:
    values = [9.0, -8.0, 7.0, 5.0, 4.0] + [0.02 * i - 1.0 for i in range(100)]
    loose, instead, both = (
        lanczos(_product(values, 0), _start(3, 105), 3, tol=tol, tol_residual=tol_residual)
        for tol, tol_residual in ((1e-2, None), (None, 1e-6), (1e-2, 1e-6))
    )
    assert (loose.residuals > 1e-6 * np.abs(loose.values)).any()
    for found in (instead, both):
        assert (found.residuals <= 1e-6 * np.abs(found.values)).all()
        assert found.converged.all()
        assert found.products > loose.products


@pytest.mark.slow
def test_an_eigenvalue_that_the_start_nearly_hides_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All residuals of the others are small before a value shows whose part of the start is 1 % of the usual one."""
    values = [28.2, 19.3, 15.1, 13.5, 12.6, -12.5, 9.7, 8.7] + [0.03 * i - 6.0 for i in range(400)]
    diagonal = torch.tensor(values, dtype=torch.float64)

    def missed() -> list[int]:
        seeds = []
        for seed in range(20):
            start = _start(seed, 408)
            start[4] = 0.01 / np.sqrt(408)
            found = lanczos(lambda v: diagonal * v, start / start.norm(), 5)
            if np.abs(found.values - values[:5]).max() > 1e-3:
                seeds.append(seed)
        return seeds

    assert missed() == []
    monkeypatch.setattr(stopping, "UNSEEN", np.inf)
    assert len(missed()) > 3  # what the other conditions leave


def test_a_search_does_not_wait_for_what_no_product_can_show() -> None:
    """Copies of a found value stay hidden; a start cannot see them, and the search ends all the same."""
    values = [5.0, 5.0, 4.0, 3.0] + [0.001 * i for i in range(60)]
    found = lanczos(_product(values, 0), _start(1, 64), 2)
    np.testing.assert_allclose(found.values, [5.0, 4.0], rtol=1e-4)
    assert found.products <= 9

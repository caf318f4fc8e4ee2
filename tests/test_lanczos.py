"""Lanczos against operators of known spectrum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from analytic import symmetric
from torch import Tensor

from landscape.curvature import krylov_basis
from landscape.curvature.lanczos import Spectrum, lanczos
from landscape.curvature.stopping import Which
from landscape.products.vectors import random_unit

DECAYING = [3.0 / (1 + i) ** 2 for i in range(20)]
SPECTRA: dict[str, list[float]] = {
    "outliers over a bulk": [40.0, 11.0, 5.0, 3.0, 2.0] + [0.01 * i for i in range(25)],
    "mixed signs": [9.0, -7.0, 4.0, -2.0, 1.0] + [0.02 * i - 0.2 for i in range(25)],
    "all negative": [-x for x in DECAYING],
    "clustered": [5.0, 4.999, 4.998, 4.997, 1.0] + [0.01 * i for i in range(15)],
    "pairs of opposite sign": [3.0, -2.99, 2.0, -1.99, 1.0, -0.99] + [0.01 * i - 0.05 for i in range(12)],
    "rank deficient": [7.0, -3.0, 1.0] + [0.0] * 17,
    "two weights": [2.0, -5.0],
    "three weights": [2.0, -5.0, 3.0],
}


def _product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vector: matrix @ vector


def _start(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return random_unit(n, seed, device=torch.device("cpu"), dtype=dtype)


def _spectrum(values: list[float], k: int, *, which: Which = "LM", tol: float = 1e-8, steps: int = 200) -> Spectrum:
    return lanczos(
        _product(symmetric(values)), _start(len(values)), k, which=which, tol=tol, max_steps=steps, vectors=True
    )


def _wanted(values: list[float], k: int, which: Which) -> list[float]:
    falling = sorted(values, reverse=True)
    if which == "both":
        return falling[:k] + falling[::-1][:k]
    order: dict[str, list[float]] = {"LA": falling, "SA": falling[::-1], "LM": sorted(values, key=abs, reverse=True)}
    return order[which][:k]


@pytest.mark.parametrize("which", ["LM", "LA", "SA", "both"])
@pytest.mark.parametrize("name", SPECTRA)
def test_values_are_those_prescribed_in_the_order_asked_for(name: str, which: Which) -> None:
    values = SPECTRA[name]
    k = min(3, len(values))
    found = _spectrum(values, k, which=which, tol=1e-10)
    np.testing.assert_allclose(found.values, _wanted(values, k, which), rtol=0, atol=1e-9 * max(map(abs, values)))
    assert (found.largest, found.smallest) == pytest.approx(
        (max(values), min(values)), abs=1e-3 * max(map(abs, values))
    )


@pytest.mark.parametrize("seed", range(20))
def test_near_ties_of_opposite_sign_keep_their_signs(seed: int) -> None:
    values = [5.0, -4.99, 1.0] + [0.05 * i - 0.5 for i in range(30)]
    found = lanczos(_product(symmetric(values, seed)), _start(len(values), seed + 100), 2, tol=1e-5)
    assert sorted(found.values) == pytest.approx([-4.99, 5.0], rel=1e-5)


@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
def test_k_equal_to_n_gives_the_whole_spectrum(which: Which) -> None:
    values = SPECTRA["mixed signs"][:12]
    np.testing.assert_allclose(_spectrum(values, 12, which=which).values, _wanted(values, 12, which), atol=1e-12)


def test_one_weight_the_zero_operator_and_the_identity_have_their_one_eigenvalue() -> None:
    found = lanczos(lambda v: -3.0 * v, _start(1), 1, which="both", vectors=True)
    assert found.values.tolist() == [-3.0, -3.0]
    assert found.residuals.tolist() == [0.0, 0.0]
    assert found.converged.all()
    assert found.products == 1
    found = lanczos(torch.zeros_like, _start(50), 3)
    assert found.values.tolist() == [0.0, 0.0, 0.0]
    assert not found.converged.any()
    assert found.products == 4
    found = lanczos(lambda v: 1.0 * v, _start(30), 4)
    np.testing.assert_allclose(found.values, np.ones(4), atol=1e-13)
    assert found.converged.all()


def test_zeros_beyond_the_rank_are_found_but_never_count_as_converged() -> None:
    found = _spectrum(SPECTRA["rank deficient"], 5)
    np.testing.assert_allclose(found.values, [7, -3, 1, 0, 0], atol=1e-12)
    assert found.converged.tolist() == [True, True, True, False, False]  # no residual is a share of zero
    assert found.products <= 8


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_on_breakdown_every_wanted_copy_of_a_multiple_eigenvalue_is_found(copies: int) -> None:
    found = _spectrum([5.0] * copies + [3.0] * copies + [1.0] * copies, copies)
    np.testing.assert_allclose(found.values, [5.0] * copies, atol=1e-11)


def test_without_breakdown_one_copy_of_a_multiple_eigenvalue_is_found_and_every_value_is_true() -> None:
    values = [5.0, 5.0, 4.0, 3.0] + [0.001 * i for i in range(60)]
    found = _spectrum(values, 2, tol=1e-3)
    np.testing.assert_allclose(found.values, [5.0, 4.0], atol=1e-6)  # as documented: one start finds one copy
    distance = np.abs(np.array(values)[:, None] - found.values).min(axis=0)
    assert (distance <= found.residuals).all()


def test_an_invariant_start_does_not_hide_the_rest() -> None:
    matrix = torch.diag(torch.tensor([1.0, 9.0, -4.0, 2.0], dtype=torch.float64))
    start = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    np.testing.assert_allclose(lanczos(_product(matrix), start, 2).values, [9.0, -4.0], atol=1e-12)


@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("name", ["outliers over a bulk", "mixed signs", "clustered"])
def test_residuals_are_those_of_the_vectors_and_bound_the_error(name: str, tol: float) -> None:
    values = SPECTRA[name]
    matrix = symmetric(values)
    found = lanczos(_product(matrix), _start(len(values)), 4, tol=None, tol_residual=tol, vectors=True)
    assert found.vectors is not None
    recomputed = (found.vectors @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors).norm(dim=1).numpy()
    floor = 1e-13 * max(map(abs, values))
    np.testing.assert_allclose(found.residuals, np.maximum(recomputed, floor), rtol=1e-4, atol=floor)
    assert (np.abs(np.array(values)[:, None] - found.values).min(axis=0) <= found.residuals + 1e-12).all()
    assert (found.converged == (found.residuals <= tol * np.abs(found.values))).all()


def test_vectors_are_orthonormal_and_point_towards_the_start() -> None:
    values = SPECTRA["mixed signs"]
    found = _spectrum(values, 4)
    assert found.vectors is not None
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(4, dtype=torch.float64), atol=1e-10, rtol=0)
    assert (found.vectors @ _start(len(values)) > 0).all()


@pytest.mark.parametrize(("which", "expected"), [("LA", [2.0, 1.0]), ("both", [2.0, -1.0]), ("LM", [-4.0, 2.0])])
def test_vectors_of_the_next_ranks_are_those_of_the_next_values(which: Which, expected: list[float]) -> None:
    matrix = symmetric([5.0, 2.0, 1.0, 0.0, -1.0, -4.0])
    further = 1 if which == "both" else 2
    found = lanczos(_product(matrix), _start(6), 1, which=which, tol=1e-15, max_steps=6, further=further)
    assert found.vectors is None
    assert found.further is not None
    assert [float(v @ matrix @ v) for v in found.further] == pytest.approx(expected, abs=1e-9)
    assert _spectrum([1.0], 1).further is None


def test_nodes_and_weights_integrate_polynomials_over_the_spectral_density_of_the_start() -> None:
    matrix, start = symmetric(SPECTRA["mixed signs"]), _start(30)
    found = lanczos(_product(matrix), start, 3, tol=1e-3)
    assert (found.weights >= 0).all()
    power = start
    for degree in range(2 * found.products):  # Gauss quadrature is exact up to degree 2 m - 1
        moment = torch.dot(start, power).item()
        assert float(found.weights @ found.nodes**degree) == pytest.approx(moment, rel=1e-8, abs=1e-8 * 9.0**degree)
        power = matrix @ power


def test_with_too_few_products_nothing_is_reported_as_converged() -> None:
    found = _spectrum([1.0 + 0.001 * i for i in range(60)], 3, tol=1e-3, steps=5)
    assert found.products == 5
    assert not found.converged.any()
    assert (found.residuals > 1e-3 * np.abs(found.values)).all()


def test_few_products_suffice_even_if_the_other_end_of_the_spectrum_is_zero() -> None:
    values = SPECTRA["outliers over a bulk"]
    spent = [lanczos(_product(symmetric(values, s)), _start(30, s), 5, tol=1e-3).products for s in range(10)]
    assert max(spent) <= 10


@pytest.mark.parametrize("seed", range(5))
def test_both_ends_converge_to_the_requested_residual_and_only_on_request(seed: int) -> None:
    values = [9.0, 8.0, 7.0] + [0.05 * i - 2.0 for i in range(60)]  # the smallest, -2, is the edge of a bulk
    spectra = [
        lanczos(_product(symmetric(values, seed)), _start(63, seed), 3, ends=ends) for ends in (1.0, 0.03, 0.001)
    ]
    for found, ends in zip(spectra[1:], (0.03, 0.001), strict=True):
        assert found.ends[1] <= max(ends * abs(found.smallest), 1e-3 * 9.0)
        assert abs(found.smallest + 2.0) <= found.ends[1]
    assert spectra[0].ends[1] > 0.03 * abs(spectra[0].smallest)  # not requested, not converged
    assert spectra[0].products < spectra[1].products <= spectra[2].products
    np.testing.assert_allclose(spectra[0].values, [9, 8, 7], rtol=1e-5)


@pytest.mark.parametrize("call", [1, 4])
def test_a_non_finite_operator_is_an_error(call: int) -> None:
    calls = 0

    def product(vector: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return vector * (torch.nan if calls == call else calls)

    with pytest.raises(FloatingPointError, match="not finite"):
        lanczos(product, _start(10), 3)


def test_single_precision_claims_no_residual_below_its_rounding() -> None:
    values = SPECTRA["outliers over a bulk"]
    found = lanczos(_product(symmetric(values).float()), _start(30, dtype=torch.float32), 5, tol=1e-5, vectors=True)
    assert found.residuals.min() >= 1e-6 * 40.0 * (1 - 1e-5)
    np.testing.assert_allclose(found.values, sorted(values)[:-6:-1], atol=1e-6 * 40)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["LM", "LA", "SA", "both"])
@pytest.mark.parametrize("name", ["outliers over a bulk", "mixed signs", "a slow bulk"])
def test_restarts_change_the_memory_and_not_the_spectrum(name: str, which: Which) -> None:
    slow = [2.0 + 0.01 * i for i in range(150)] + [-1.0 - 0.01 * i for i in range(150)]  # no gap at either end
    values = {**SPECTRA, "a slow bulk": slow}[name]
    matrix, n, start = symmetric(values), len(values), _start(len(values), 6)
    whole, restarted = (
        lanczos(_product(matrix), start, 3, which=which, tol=1e-9, room=room, max_steps=n + 500, vectors=True)
        for room in (n, 16)
    )
    np.testing.assert_allclose(restarted.values, _wanted(values, 3, which), rtol=1e-9, atol=1e-12)
    assert (restarted.converged | (np.abs(restarted.values) < 1e-9)).all()  # no residual is a share of zero
    assert restarted.vectors is not None
    true = restarted.vectors @ matrix - torch.from_numpy(restarted.values)[:, None] * restarted.vectors
    np.testing.assert_allclose(restarted.residuals, true.norm(dim=1), rtol=1e-3, atol=1e-11)
    assert (restarted.vectors @ start > 0).all()
    assert len(restarted.nodes) <= 16
    if name == "a slow bulk":
        assert restarted.products > whole.products > 16
    assert restarted.weights.sum() == pytest.approx(1.0)
    assert restarted.weights @ restarted.nodes == pytest.approx(float(start @ matrix @ start))


@pytest.mark.slow
@pytest.mark.parametrize("room", [16, 200])
def test_a_basis_in_half_precision_reports_the_residuals_of_its_vectors(room: int) -> None:
    values = [40.0, 11.0, -5.0, 3.0, 2.9] + [0.001 * i - 0.5 for i in range(995)]
    matrix = symmetric(values)
    found = lanczos(
        _product(matrix.float()), _start(1000, dtype=torch.float32), 5, room=room, storage=torch.float16, vectors=True
    )
    np.testing.assert_allclose(found.values, values[:5], rtol=1e-5)
    assert found.vectors is not None
    assert found.vectors.dtype == torch.float32
    true = found.vectors.double() @ matrix - torch.from_numpy(found.values)[:, None] * found.vectors.double()
    np.testing.assert_allclose(found.residuals, np.maximum(true.norm(dim=1).numpy(), 4e-5), rtol=0.1)
    assert found.converged.all()


def test_values_are_accurate_to_single_precision_for_any_number_of_weights() -> None:
    n = 400_000  # a plain float32 sum of as many squares is wrong by 2e-5
    diagonal = torch.linspace(-1e-3, 1e-3, n)
    diagonal[[5, n // 2, n - 3]] = torch.tensor([687.0, -455.5, 292.8])
    found = lanczos(lambda v: diagonal * v, _start(n, dtype=torch.float32), 3)
    np.testing.assert_allclose(found.values, diagonal[[5, n // 2, n - 3]].double(), rtol=2e-6)


@pytest.mark.slow
def test_the_search_waits_for_a_value_of_the_other_sign_that_still_grows() -> None:
    wrong = []
    for seed in range(0, 60):
        generator = np.random.default_rng(seed)
        values = [5.0, 4.0, 3.0, 2.5, 1.5, -1.49 + 0.005 * generator.normal(), *(0.3 * generator.normal(size=80))]
        found = lanczos(_product(symmetric(values, seed)), _start(len(values), seed + 100), 5)
        if not np.allclose(sorted(found.values), sorted(sorted(values, key=abs)[-5:]), atol=1e-3):
            wrong.append(seed)
    assert wrong == []


@pytest.mark.parametrize("storage", [None, torch.float16])
def test_a_basis_in_several_blocks_is_that_in_one(storage: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    start, vector, *rows = torch.randn(25, 300, generator=torch.Generator().manual_seed(0))
    found = []
    for growth in (32, 5):
        monkeypatch.setattr(krylov_basis, "GROWTH", growth)
        basis = krylov_basis.Basis(start[None], 22, storage)
        for row in rows[:21]:
            remainder = basis.orthogonal(row[None])
            basis.append(remainder / remainder.norm())
        coefficients = np.linalg.qr(np.vander(np.linspace(-1, 1, 22), 7))[0]
        before = basis.combinations(0, coefficients)
        basis.keep(coefficients[None])
        basis.append(basis.orthogonal(rows[21][None]) / basis.orthogonal(rows[21][None]).norm())
        assert len(basis) == 8
        found.append((before, basis.orthogonal(vector[None]), basis.last, basis.combinations(0, np.eye(8))))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-3 if storage else 1e-5, atol=1e-3 if storage else 1e-5)

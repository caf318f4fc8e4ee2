"""Searches side by side against one alone, dense spectra, and what a device must not be asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from analytic import symmetric
from torch import Tensor

from landscape.curvature import krylov_basis
from landscape.curvature.krylov_basis import Basis
from landscape.curvature.lanczos import Spectrum, _Recurrence, lanczos, run, searches
from landscape.curvature.stopping import StoppingRule, Which
from landscape.products.vectors import random_unit

N = 150
BULK = [-0.9, -0.6, -0.5, *(0.3 * np.sin(i) for i in range(N))]
SPECTRA: dict[str, list[float]] = {
    "outliers over a bulk": [40.0, 11.0, 5.0, 3.0, 2.0],
    "mixed signs": [9.0, -7.0, 4.0, -2.0, 1.0],
    "clustered": [5.0, 4.99, 4.98, 4.97, 1.0],
    "pairs of opposite sign": [3.0, -2.99, 2.0, -1.99, 1.5, -1.49],
    "slow": [0.61, 0.5],
}
CPU = torch.device("cpu")


def _matrices(spectra: Sequence[Sequence[float]] = tuple(SPECTRA.values())) -> Tensor:
    return torch.stack([symmetric([*values, *BULK][:N], i) for i, values in enumerate(spectra)])


def _starts(count: int, n: int = N, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([random_unit(n, i + 7, device=CPU, dtype=dtype) for i in range(count)])


def _product(matrices: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda rows: torch.einsum("mij,mj->mi", matrices, rows)


def _both(matrices: Tensor, k: int, **options: Any) -> list[tuple[Spectrum, Spectrum]]:
    """The search alone and that side by side, by operator."""
    stride = options.pop("stride", 1)
    starts = _starts(len(matrices), matrices.shape[1], matrices.dtype)
    named = {name: options[name] for name in options.keys() & set(StoppingRule.__annotations__)}
    how = {name: value for name, value in options.items() if name not in named}
    together = run(_product(matrices), searches(starts, StoppingRule(k, **named), stride=stride, **how))
    alone = [
        lanczos(lambda v, matrix=matrix: matrix @ v, start, k, **options)
        for matrix, start in zip(matrices, starts, strict=True)
    ]
    pairs = []
    for one, other in zip(alone, together, strict=True):
        assert other is not None
        pairs.append((one, other))
    return pairs


def _expected(matrix: Tensor, k: int, which: Which) -> np.ndarray:
    values = torch.linalg.eigvalsh(matrix.double()).numpy()
    falling = values[::-1]
    order = {"LA": falling[:k], "SA": values[:k], "both": np.concatenate([falling[:k], values[:k]])}
    return order[which] if which != "LM" else values[np.argsort(-np.abs(values), kind="stable")][:k]


@pytest.mark.parametrize("room", [100, 18])  # the smaller one restarts
@pytest.mark.parametrize("which", ["LM", "LA", "SA", "both"])
def test_every_search_is_that_of_its_operator_alone(which: Which, room: int) -> None:
    matrices = _matrices()
    products = set()
    for i, (alone, found) in enumerate(_both(matrices, 2, which=which, tol=1e-8, room=room, vectors=True, further=1)):
        assert found.products == alone.products
        products.add(found.products)
        for name in ("values", "largest", "smallest", "nodes", "weights"):
            np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=0, atol=1e-7)
        for name in ("residuals", "errors", "ends"):
            np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-2, atol=1e-10)
        np.testing.assert_array_equal(found.converged, alone.converged)
        np.testing.assert_allclose(found.values, _expected(matrices[i], 2, which), rtol=1e-7)
        assert found.vectors is not None
        assert alone.vectors is not None
        torch.testing.assert_close(found.vectors, alone.vectors, rtol=0, atol=1e-6)
        assert found.further is not None
        torch.testing.assert_close(found.further, alone.further, rtol=0, atol=1e-4)
    assert len(products) > 1  # they end at different steps


@pytest.mark.parametrize("room", [100, 18])
@pytest.mark.parametrize("stride", [2, 3, 4])
def test_with_fewer_tests_the_values_are_the_same_after_a_few_more_products(stride: int, room: int) -> None:
    matrices = _matrices()
    for i, (alone, found) in enumerate(_both(matrices, 2, tol=1e-8, room=room, stride=stride, vectors=True)):
        assert 0 <= found.products - alone.products < stride if room == 100 else found.products <= 2 * alone.products
        np.testing.assert_allclose(found.values, _expected(matrices[i], 2, "LM"), rtol=1e-7)
        assert found.converged.all()
        assert found.vectors is not None
        residual = found.vectors @ matrices[i] - torch.from_numpy(found.values)[:, None] * found.vectors
        np.testing.assert_allclose(residual.norm(dim=1).numpy(), found.residuals, rtol=1e-3, atol=1e-11)
        assert found.weights.sum() == pytest.approx(1.0)


def test_transfers_happen_at_tests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    transferred = _Recurrence.transferred

    def count(self: _Recurrence) -> np.ndarray:
        columns = transferred(self)
        seen.append(len(columns))
        return columns

    monkeypatch.setattr(_Recurrence, "transferred", count)
    run(_product(_matrices()), searches(_starts(5), StoppingRule(2, tol=1e-8), room=100, stride=4))
    assert seen[0] == 4  # two values and two products more
    assert set(seen[1:]) == {4}


@pytest.mark.parametrize("storage", [None, torch.float16])
def test_steps_between_tests_stay_on_the_device(storage: torch.dtype | None) -> None:
    """On a device without values: to ask for one, or to mix it with the CPU, raises."""
    recurrence = _Recurrence(torch.empty(8, 40_000, device="meta"), 100, storage)
    for _ in range(40):  # into a second block of rows
        assert recurrence.basis.last.shape == (8, 40_000)
        recurrence.extend(recurrence.basis.last * 2)
        recurrence.append()
    assert all(column.is_meta for column in recurrence._columns)
    recurrence.basis.keep(np.zeros((8, len(recurrence.basis), 30)))
    assert len(recurrence.basis) == 30


@pytest.mark.parametrize("stride", [1, 4])
def test_an_operator_that_is_not_finite_does_not_affect_the_others(stride: int) -> None:
    matrices = _matrices()
    matrices[1, 3, 5] = float("nan")
    matrices[3] = float("inf")
    found = run(_product(matrices), searches(_starts(5), StoppingRule(2, tol=1e-8), room=100, stride=stride))
    assert [one is None for one in found] == [False, True, False, True, False]
    for i in (0, 2, 4):
        one = found[i]
        assert one is not None
        np.testing.assert_allclose(one.values, _expected(matrices[i], 2, "LM"), rtol=1e-7)


@pytest.mark.parametrize("stride", [1, 4])
def test_operators_of_low_rank_end_beside_one_that_goes_on(stride: int) -> None:
    zero, low = torch.zeros(N, N, dtype=torch.float64), torch.zeros(N, N, dtype=torch.float64)
    low[0, 0], low[1, 1], low[2, 2] = 7.0, -3.0, 7.0
    identity = torch.eye(N, dtype=torch.float64)
    matrices = torch.stack([zero, low, identity, _matrices()[1]])
    search = searches(_starts(4), StoppingRule(3, tol=1e-8), room=100, stride=stride, vectors=True)
    found = run(_product(matrices), search)
    values = [one.values if one is not None else np.zeros(0) for one in found]
    np.testing.assert_allclose(values[0], [0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(values[1], [7, 7, -3], atol=1e-9)  # also the second copy
    np.testing.assert_allclose(values[2], [1, 1, 1], atol=1e-12)
    np.testing.assert_allclose(values[3], _expected(matrices[3], 3, "LM"), rtol=1e-7)
    for one in found:
        assert one is not None
        assert one.vectors is not None
        gram = one.vectors @ one.vectors.T
        torch.testing.assert_close(gram, torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0)
        assert one.weights.sum() == pytest.approx(1.0)
        assert len(one.nodes) == one.products


@pytest.mark.parametrize("n", [1, 2, 6])
def test_fewer_weights_than_room_give_the_whole_spectrum(n: int) -> None:
    matrices = torch.stack([symmetric([5.0, -4.0, 3.0, 2.0, -1.0, 0.5][:n], seed) for seed in range(3)])
    k = min(n, 3)
    for i, (alone, found) in enumerate(_both(matrices, k, stride=4)):
        np.testing.assert_allclose(found.values, _expected(matrices[i], k, "LM"), rtol=1e-10)
        assert found.products == alone.products <= n


def test_unconverged_values_are_returned_at_the_cap() -> None:
    for stride in (1, 3):
        for alone, found in _both(_matrices(), 3, tol=1e-9, max_steps=7, room=100, stride=stride):
            assert found.products == alone.products == 7
            np.testing.assert_allclose(found.values, alone.values, rtol=1e-9)
            assert not found.converged.all()


@pytest.mark.parametrize("stride", [1, 3])
def test_half_precision_is_recomputed_with_one_product_per_value(stride: int) -> None:
    matrices = _matrices().float()
    for i, (alone, found) in enumerate(_both(matrices, 2, storage=torch.float16, room=100, stride=stride)):
        np.testing.assert_allclose(found.values, _expected(matrices[i], 2, "LM"), rtol=1e-4)
        assert alone.products <= found.products < alone.products + stride + 2
        assert found.vectors is None


@pytest.mark.parametrize("storage", [None, torch.float16])
@pytest.mark.parametrize("slice_length", [None, 37, 8])
def test_slices_give_the_basis_of_every_search(
    slice_length: int | None, storage: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU has them, and so few entries converted at once that every loop runs more than once."""
    monkeypatch.setattr(krylov_basis, "CPU_BLOCK", 500)
    generator = torch.Generator().manual_seed(0)
    n, close = 100, 1e-5 if storage is None else 3e-3
    starts = torch.randn(3, n, generator=generator)
    basis = Basis(starts, 60, storage, slice_length=slice_length)
    singles = [Basis(start[None], 60, storage) for start in starts]
    coefficients = torch.randn(3, 41, 36, generator=generator).double().numpy()
    for step in range(45):
        rows = torch.randn(3, n, generator=generator)
        rest = basis.orthogonal(rows)
        expected = torch.cat([single.orthogonal(row[None]) for single, row in zip(singles, rows, strict=True)])
        torch.testing.assert_close(rest, expected, atol=close * 10, rtol=0)
        if step == 40:  # a restart in between
            combined = torch.stack([basis.combinations(i, coefficients[i, :, :3]) for i in range(3)])
            kept = np.linalg.qr(coefficients)[0]
            basis.keep(kept)
            for i, single in enumerate(singles):
                torch.testing.assert_close(
                    combined[i], single.combinations(0, coefficients[i, :, :3]), atol=close * 10, rtol=0
                )
                single.keep(kept[i : i + 1])
        rows = expected / expected.norm(dim=1, keepdim=True)
        basis.append(rows)
        torch.testing.assert_close(basis.last, rows, atol=close, rtol=0)
        for single, row in zip(singles, rows, strict=True):
            single.append(row[None])

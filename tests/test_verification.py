"""The second search finds the copies that one start vector misses, and nothing where nothing is missed."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from analytic import symmetric
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, lanczos
from landscape.curvature.spectrum import verified
from landscape.curvature.stopping import StoppingRule, Which
from landscape.products.vectors import random_unit

BULK = [0.001 * i for i in range(60)]


def _product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vector: matrix @ vector


def _both(values: list[float], k: int, which: Which = "LM", tol_residual: float = 1e-4) -> tuple[Spectrum, Spectrum]:
    product = _product(symmetric(values))
    start = random_unit(len(values), 0, device=torch.device("cpu"), dtype=torch.float64)
    found = lanczos(product, start, k, which=which, tol_residual=tol_residual, vectors=True)
    return found, verified(product, found, StoppingRule(1, which, None, tol_residual), 17)


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_every_copy_of_a_multiple_eigenvalue_is_found_and_counted(copies: int) -> None:
    found, checked = _both([5.0] * copies + [4.0, 3.0, 2.0, 1.0] + BULK, 5)
    expected = ([5.0] * copies + [4.0, 3.0, 2.0, 1.0])[:5]
    assert (found.values > 4.9).sum() == 1  # one start finds one copy
    np.testing.assert_allclose(checked.values, expected, atol=1e-6)
    assert checked.missed == copies - 1
    assert checked.products > found.products


@pytest.mark.parametrize("which", ["LM", "LA", "SA", "both"])
def test_nothing_is_missed_in_a_simple_spectrum(which: Which) -> None:
    found, checked = _both([9.0, -7.0, 4.0, -2.0, 1.0] + [0.02 * i - 0.2 for i in range(25)], 2, which)
    assert checked.missed == 0
    np.testing.assert_array_equal(checked.values, found.values)
    assert checked.products > found.products


def test_ties_keep_all_copies_and_signs_at_both_ends_and_zeros_of_the_projection_are_no_values() -> None:
    _, checked = _both([3.0, 3.0, -3.0, -3.0, 1.0, 0.8, 0.6, *BULK], 4)
    np.testing.assert_allclose(np.sort(checked.values), [-3, -3, 3, 3], atol=1e-6)
    assert checked.missed == 2
    _, checked = _both([5.0, 5.0, 3.0, -4.0, -4.0, -1.0, *BULK], 2, "both")
    np.testing.assert_allclose(checked.values, [5, 5, -4, -4], atol=1e-6)
    assert checked.missed == 2
    _, checked = _both([1.0, 1.0, 2.0, 3.0], 2, "SA")
    np.testing.assert_allclose(checked.values, [1, 1], atol=1e-9)
    _, checked = _both([1.0, 2.0, 3.0], 3, "SA")
    np.testing.assert_allclose(checked.values, [1, 2, 3], atol=1e-9)
    assert checked.missed == 0


@pytest.mark.parametrize("tol", [1e-2, 1e-4])
def test_residuals_of_missed_values_bound_the_true_ones(tol: float) -> None:
    values = [5.0, 5.0, 5.0, 4.0, 3.0, 2.0, *BULK]
    matrix = symmetric(values)
    _, spectrum = _both(values, 4, tol_residual=tol)
    true = (spectrum.vectors @ matrix - torch.from_numpy(spectrum.values)[:, None] * spectrum.vectors).norm(dim=1)
    assert (true.numpy() <= spectrum.residuals * (1 + 1e-9) + 1e-12).all()
    products = spectrum.vectors @ spectrum.vectors.T
    torch.testing.assert_close(products, torch.eye(4, dtype=torch.float64), atol=1e-7, rtol=0)


def test_verifying_needs_the_vectors() -> None:
    start = random_unit(4, 0, device=torch.device("cpu"), dtype=torch.float64)
    product = _product(symmetric([4.0, 3.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="vectors=True"):
        verified(product, lanczos(product, start, 1), StoppingRule(1))

"""Principal axes from a Gram matrix against numpy's SVD of the vectors themselves."""

from __future__ import annotations

import numpy as np

from landscape.weight_space.weight_differences import principal_axes


def _vectors(count: int = 7, size: int = 40, *, seed: int = 0) -> np.ndarray:
    """A path that ends at the origin, as differences from the last snapshot do."""
    steps = np.random.default_rng(seed).normal(size=(count, size)) * np.linspace(3, 1, size)
    path = np.cumsum(steps, axis=0)
    difference: np.ndarray = path - path[-1]
    return difference


def test_axes_coordinates_and_shares_are_those_of_the_svd() -> None:
    vectors = _vectors()
    found = principal_axes(vectors @ vectors.T, 3)
    centred = vectors - vectors.mean(axis=0)
    _, singular, right = np.linalg.svd(centred, full_matrices=False)
    axes = found.coefficients @ vectors
    np.testing.assert_allclose(np.abs((axes * right[:3]).sum(axis=1)), np.ones(3), rtol=1e-10)
    np.testing.assert_allclose(found.coordinates, axes @ vectors.T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.explained, (singular**2 / (singular**2).sum())[:3], rtol=1e-10)
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-10)


def test_the_end_lies_at_the_origin_and_signs_are_fixed() -> None:
    vectors = _vectors()
    found, mirrored = (principal_axes(v @ v.T) for v in (vectors, -vectors))
    np.testing.assert_allclose(found.coordinates[:, -1], 0.0, atol=1e-9)
    assert (found.coordinates[[0, 1], np.abs(found.coordinates).argmax(axis=1)] > 0).all()
    np.testing.assert_allclose(found.coordinates, mirrored.coordinates, atol=1e-9)


def test_no_movement_has_no_axes() -> None:
    found = principal_axes(np.zeros((3, 3)))
    assert not found.coefficients.any()
    assert found.explained.tolist() == [0.0, 0.0]
    assert found.off_plane.tolist() == [0.0, 0.0, 0.0]


def test_more_axes_than_vectors_are_zero() -> None:
    vectors = _vectors(2)
    found = principal_axes(vectors @ vectors.T, 4)
    assert found.coefficients.shape == (4, 2)
    assert not found.coefficients[1:].any()
    np.testing.assert_allclose(found.explained, [1, 0, 0, 0], atol=1e-12)

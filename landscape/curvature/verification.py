"""A second Lanczos search for missed eigenvalues: one start vector cannot see further copies of a multiple value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.batched_lanczos import device_lanczos
from landscape.curvature.lanczos import Spectrum
from landscape.curvature.stopping import Which, wanted
from landscape.curvature.vectors import random_unit

PER_VALUE = ("values", "residuals", "converged", "errors")  # arrays of a spectrum with a row per eigenvalue


def verified(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    *,
    which: Which,
    tol_residual: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
) -> Spectrum:
    """Search the orthogonal complement of the found eigenvectors, until its outermost value is not a wanted one.

    Lanczos from a fresh random start on P H P, P the projection off the vectors V found so far, for its one outermost
    value. It was missed if it lies further out than the last wanted value, by more than both residuals; it then joins V
    and the search goes on, so that a value of any multiplicity is found, one search per copy.

    The residual of a value found there is sqrt(r^2 + ||H V - V Theta||^2), r that on P H P: an upper bound of that on
    H, without a product.

    With `both` one end is searched after the other. `tol_residual` is the relative residual of what is searched, and
    should be that of the vectors: what is further out by less than their residuals is not seen. `max_steps` caps the
    products of one search; the seed must not be that of the first run. The missed values get their places in the
    spectrum; `missed` counts them, and `products` includes the search.

    Raises:
        ValueError: the spectrum has no vectors.
        FloatingPointError: the operator returned a non-finite vector.
    """
    if found.vectors is None:
        raise ValueError("verifying needs the eigenvectors; call lanczos with vectors=True")
    if which != "both":
        return _searched(product, found, None, which, tol_residual, max_steps, seed)
    k = len(found.values) // 2
    parts = [_part(found, np.arange(k)), _part(found, np.arange(k, 2 * k))]
    upper = _searched(product, parts[0], parts[1].vectors, "LA", tol_residual, max_steps, seed)
    lower = _searched(product, parts[1], upper.vectors, "SA", tol_residual, max_steps, seed + 1)
    products, missed = upper.products + lower.products - found.products, upper.missed + lower.missed
    return replace(found, **_joined(upper, lower), products=products, missed=missed)


def _searched(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    excluded: Tensor | None,
    which: Which,
    tol_residual: float,
    max_steps: int,
    seed: int,
) -> Spectrum:
    k, n, known, missed = len(found.values), _vectors(found).shape[1], found, 0
    while True:
        off = _vectors(known) if excluded is None else torch.cat([_vectors(known), excluded])
        off = _orthonormal(off)
        if len(off) >= n:
            break

        def complement(vector: Tensor, off: Tensor = off) -> Tensor:
            vector = product(vector - off.T @ (off @ vector))
            return vector - off.T @ (off @ vector)

        start = random_unit(n, seed + 1000 * missed, device=off.device, dtype=off.dtype)
        start = start - off.T @ (off @ start)
        options: dict[str, Any] = {"tol": None, "tol_residual": tol_residual, "max_steps": max_steps, "vectors": True}
        extra = device_lanczos(complement, start, 1, which=which, **options)
        known = replace(known, products=known.products + extra.products)
        # The search may wander into the span of V itself, whose values on P H P are zero.
        inside = bool((off @ _vectors(extra)[0]).norm() > 0.5)
        value, last = extra.values[0], wanted(known.values, k, which)[-1]
        leak = float(np.sqrt(extra.residuals[0] ** 2 + np.square(known.residuals).sum()))
        if inside or not _further_out(value, known.values[last], leak + known.residuals[last], which):
            break
        missed += 1
        bound = np.array([leak])
        extra = replace(extra, residuals=bound, errors=bound, converged=bound <= tol_residual * np.abs(extra.values))
        known = replace(known, **_joined(known, extra))
    return replace(_part(known, wanted(known.values, k, which)), missed=missed)


def _further_out(value: float, last: float, margin: float, which: Which) -> bool:
    if which == "LM":
        return abs(value) > abs(last) + margin
    return value > last + margin if which == "LA" else value < last - margin


def _vectors(spectrum: Spectrum) -> Tensor:
    assert spectrum.vectors is not None
    return spectrum.vectors


def _joined(*parts: Spectrum) -> dict[str, Any]:
    """The rows of several spectra one after the other."""
    rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_VALUE}
    return {**rows, "vectors": torch.cat([_vectors(part) for part in parts])}


def _part(found: Spectrum, positions: np.ndarray) -> Spectrum:
    rows: dict[str, Any] = {name: getattr(found, name)[positions] for name in PER_VALUE}
    return replace(found, vectors=_vectors(found)[positions.tolist()], **rows)


def _orthonormal(vectors: Tensor) -> Tensor:
    """A basis of the same span: joined vectors are orthogonal to single precision only; `both` may hold one twice."""
    q, r = torch.linalg.qr(vectors.T)
    rows: Tensor = q.T[r.diagonal().abs() > 1e-3]
    return rows

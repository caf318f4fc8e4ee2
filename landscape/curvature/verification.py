"""A second Lanczos search for missed eigenvalues: one start vector cannot see further copies of a multiple value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, Which, lanczos, wanted
from landscape.curvature.vectors import random_unit


def verified(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    *,
    which: Which,
    tol: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
) -> Spectrum:
    """Search the orthogonal complement of the found eigenvectors, until its outermost value is not a wanted one.

    Lanczos from a fresh random start on P H P, P the projection off the vectors V found so far, for its one outermost
    value. It was missed if it lies further out than the last wanted value, by more than both residuals; it then joins V
    and the search goes on, so that a value of any multiplicity is found, one search per copy.

    The residual of a value found there is sqrt(r^2 + ||H V - V Theta||^2), r that on P H P: an upper bound of that on
    H, without a product.

    Args:
        product: v -> H v.
        found: with its vectors.
        which: what was asked for; with `both` one end is searched after the other.
        tol: relative residual of the values searched for.
        max_steps: cap on the products of one search.
        seed: of the start vectors; not that of the first run.

    Returns:
        The spectrum with the missed values in their places; `missed` counts them, `products` includes the search.

    Raises:
        ValueError: the spectrum has no vectors.
        FloatingPointError: the operator returned a non-finite vector.
    """
    if found.vectors is None:
        raise ValueError("verifying needs the eigenvectors; call lanczos with vectors=True")
    if which != "both":
        return _searched(product, found, None, which, tol, max_steps, seed)
    k = len(found.values) // 2
    parts = [_part(found, np.arange(k)), _part(found, np.arange(k, 2 * k))]
    upper = _searched(product, parts[0], parts[1].vectors, "LA", tol, max_steps, seed)
    lower = _searched(product, parts[1], upper.vectors, "SA", tol, max_steps, seed + 1)
    assert upper.vectors is not None
    assert lower.vectors is not None
    return replace(
        found,
        values=np.concatenate([upper.values, lower.values]),
        residuals=np.concatenate([upper.residuals, lower.residuals]),
        converged=np.concatenate([upper.converged, lower.converged]),
        errors=np.concatenate([upper.errors, lower.errors]),
        products=upper.products + lower.products - found.products,
        vectors=torch.cat([upper.vectors, lower.vectors]),
        missed=upper.missed + lower.missed,
    )


def _searched(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    excluded: Tensor | None,
    which: Which,
    tol: float,
    max_steps: int,
    seed: int,
) -> Spectrum:
    assert found.vectors is not None
    k, known, missed = len(found.values), found, 0
    n = found.vectors.shape[1]
    while True:
        assert known.vectors is not None
        off = known.vectors if excluded is None else torch.cat([known.vectors, excluded])
        off = _orthonormal(off)
        if len(off) >= n:
            break
        start = random_unit(n, seed + 1000 * missed, device=off.device, dtype=off.dtype)
        extra = _outermost(product, off, start, which, tol, max_steps)
        known = replace(known, products=known.products + extra.products)
        # The search may wander into the span of V itself, whose values on P H P are zero.
        inside = extra.vectors is None or bool((off @ extra.vectors[0]).norm() > 0.5)
        value, last = extra.values[0], wanted(known.values, k, which)[-1]
        leak = float(np.sqrt(extra.residuals[0] ** 2 + np.square(known.residuals).sum()))
        if inside or not _further_out(value, known.values[last], leak + known.residuals[last], which):
            break
        missed += 1
        known = _joined(known, value, leak, extra, tol)
    return replace(_part(known, wanted(known.values, k, which)), missed=missed)


def _outermost(
    product: Callable[[Tensor], Tensor], off: Tensor, start: Tensor, which: Which, tol: float, max_steps: int
) -> Spectrum:
    def complement(vector: Tensor) -> Tensor:
        vector = product(vector - off.T @ (off @ vector))
        return vector - off.T @ (off @ vector)

    start = start - off.T @ (off @ start)
    return lanczos(complement, start, 1, which=which, tol=tol, ends=1.0, max_steps=max_steps, vectors=True)


def _further_out(value: float, last: float, margin: float, which: Which) -> bool:
    if which == "LM":
        return abs(value) > abs(last) + margin
    return value > last + margin if which == "LA" else value < last - margin


def _joined(known: Spectrum, value: float, residual: float, extra: Spectrum, tol: float) -> Spectrum:
    assert known.vectors is not None
    assert extra.vectors is not None
    return replace(
        known,
        values=np.append(known.values, value),
        residuals=np.append(known.residuals, residual),
        converged=np.append(known.converged, residual <= tol * abs(value)),
        errors=np.append(known.errors, residual),
        vectors=torch.cat([known.vectors, extra.vectors]),
    )


def _part(found: Spectrum, positions: np.ndarray) -> Spectrum:
    assert found.vectors is not None
    return replace(
        found,
        values=found.values[positions],
        residuals=found.residuals[positions],
        converged=found.converged[positions],
        errors=found.errors[positions],
        vectors=found.vectors[positions.tolist()],
    )


def _orthonormal(vectors: Tensor) -> Tensor:
    """A basis of the same span: joined vectors are orthogonal to single precision only; `both` may hold one twice."""
    q, r = torch.linalg.qr(vectors.T)
    rows: Tensor = q.T[r.diagonal().abs() > 1e-3]
    return rows

"""A second search beside what one Lanczos run found: one start vector cannot see further copies of a multiple value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, Which, lanczos, wanted
from landscape.curvature.vectors import random_unit


@dataclass(frozen=True)
class Verified:
    """A spectrum after the search.

    Args:
        spectrum: with what was missed in its place; `products` counts the search.
        missed: eigenvalues that the first run should have returned and did not.
    """

    spectrum: Spectrum
    missed: int


def verified(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    *,
    which: Which,
    tol: float = 1e-3,
    max_steps: int = 200,
    seed: int = 0,
) -> Verified:
    """Search the complement of the found eigenvectors, until its outermost value is none of the wanted.

    Lanczos from a fresh random start on P H P, P the projection off the vectors V found so far, for its one outermost
    value. It was missed where it lies further out than the last of the wanted, by more than both residuals; it then
    joins V and the search goes on, so that a value of any multiplicity is found, one search per copy.

    The residual of a value found there is sqrt(r^2 + ||H V - V Theta||^2), r that on P H P: an upper bound of that on
    H, without a product.

    Args:
        product: v -> H v.
        found: with its vectors.
        which: what was asked for; both ends are searched one after the other.
        tol: relative residual of the values searched for.
        max_steps: cap on the products of one search.
        seed: of the start vectors; another one than the first run's.

    Raises:
        ValueError: the spectrum has no vectors.
        FloatingPointError: the operator returned a non-finite vector.
    """
    if found.vectors is None:
        raise ValueError("verifying needs the eigenvectors; ask lanczos for vectors=True")
    if which == "both":
        k = len(found.values) // 2
        parts = [_part(found, np.arange(k)), _part(found, np.arange(k, 2 * k))]
        first = _searched(product, parts[0], parts[1].vectors, "LA", tol, max_steps, seed)
        second = _searched(product, parts[1], first.spectrum.vectors, "SA", tol, max_steps, seed + 1)
        upper, lower = first.spectrum, second.spectrum
        assert upper.vectors is not None
        assert lower.vectors is not None
        whole = replace(
            found,
            values=np.concatenate([upper.values, lower.values]),
            residuals=np.concatenate([upper.residuals, lower.residuals]),
            converged=np.concatenate([upper.converged, lower.converged]),
            errors=np.concatenate([upper.errors, lower.errors]),
            products=upper.products + lower.products - found.products,
            vectors=torch.cat([upper.vectors, lower.vectors]),
        )
        return Verified(whole, first.missed + second.missed)
    return _searched(product, found, None, which, tol, max_steps, seed)


def _searched(
    product: Callable[[Tensor], Tensor],
    found: Spectrum,
    beside: Tensor | None,
    which: Which,
    tol: float,
    max_steps: int,
    seed: int,
) -> Verified:
    assert found.vectors is not None
    k, known, missed = len(found.values), found, 0
    n = found.vectors.shape[1]
    while True:
        assert known.vectors is not None
        off = known.vectors if beside is None else torch.cat([known.vectors, beside])
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
        known = _joined(known, value, leak, extra, tol, which)
    return Verified(_part(known, wanted(known.values, k, which)), missed)


def _outermost(
    product: Callable[[Tensor], Tensor], off: Tensor, start: Tensor, which: Which, tol: float, max_steps: int
) -> Spectrum:
    def beside(vector: Tensor) -> Tensor:
        vector = product(vector - off.T @ (off @ vector))
        return vector - off.T @ (off @ vector)

    start = start - off.T @ (off @ start)
    return lanczos(beside, start, 1, which=which, tol=tol, ends=1.0, max_steps=max_steps, vectors=True)


def _further_out(value: float, last: float, margin: float, which: Which) -> bool:
    if which == "LM":
        return abs(value) > abs(last) + margin
    return value > last + margin if which == "LA" else value < last - margin


def _joined(known: Spectrum, value: float, residual: float, extra: Spectrum, tol: float, which: Which) -> Spectrum:
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


def _part(found: Spectrum, chosen: np.ndarray) -> Spectrum:
    assert found.vectors is not None
    return replace(
        found,
        values=found.values[chosen],
        residuals=found.residuals[chosen],
        converged=found.converged[chosen],
        errors=found.errors[chosen],
        vectors=found.vectors[chosen.tolist()],
    )


def _orthonormal(vectors: Tensor) -> Tensor:
    """The same span: in single precision the joined vectors are orthogonal only nearly; `both` may hold one twice."""
    q, r = torch.linalg.qr(vectors.T)
    rows: Tensor = q.T[r.diagonal().abs() > 1e-3]
    return rows

"""Extreme eigenvalues of a symmetric operator from its products with vectors (Lanczos 1950)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.krylov_projection import Projection
from landscape.curvature.stopping import RitzPairs, StoppingRule, Which, wanted
from landscape.curvature.vectors import dot, length

Search = Generator[Tensor, Tensor, "Spectrum"]  # yields v, is sent H v, returns the spectrum


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in the requested order, each with a bound."""

    values: np.ndarray  # (k,)
    # ||H v - lambda v||, (k,): an eigenvalue of H lies within it. Includes rounding. Says nothing about further
    # copies of a multiple eigenvalue: one start vector finds one
    residuals: np.ndarray
    converged: np.ndarray  # within the tolerances, (k,); see `stopping.StoppingRule`
    errors: np.ndarray  # estimates min(r, r^2 / gap) of the errors, (k,); see `stopping.RitzPairs`
    largest: float  # algebraically largest Ritz value, with its residual in `ends`
    smallest: float  # algebraically smallest one
    ends: tuple[float, float]  # residuals of (largest, smallest)
    # Ritz values, (m,): with `weights` a quadrature of the spectral density (before the first restart)
    nodes: np.ndarray
    weights: np.ndarray  # (m,), non-negative, sum 1
    products: int  # operator products spent
    vectors: Tensor | None = None  # (k, n) if requested, each in the half space of the start vector
    further: Tensor | None = None  # Ritz vectors of the next ranks, (further, n) at most, which need not have converged
    missed: int = 0  # how many of the values only the search of `verification.verified` found


def lanczos_search(
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float | None = 1e-4,
    tol_residual: float | None = None,
    ends: float = 1.0,
    max_steps: int = 200,
    room: int = 200,
    storage: torch.dtype | None = None,
    vectors: bool = False,
    further: int = 0,
    unseen: float = 1.0,
) -> Search:
    """The k wanted eigenvalues by Lanczos with full reorthogonalisation, tested at every step; a generator.

    `batched_lanczos` runs several side by side. Two passes of classical Gram-Schmidt per step ("twice is enough",
    Giraud et al. 2005). A random start is needed: gradient-like starts hide eigenvectors. On breakdown (an invariant
    subspace) it continues with a random vector orthogonal to the basis, until that changes no wanted value. A full
    basis is restarted with its best vectors (thick restart, Wu & Simon 2000).

    Args:
        start: random vector, (n,); its dtype and device are those of the arithmetic.
        k: how many.
        which: which ones.
        tol: largest estimated relative error, see `StoppingRule`.
        tol_residual: largest relative residual.
        ends: also converge both algebraic ends; 0.1: to about one per cent, for about one product.
        max_steps: cap on the number of products, at least k; values unconverged then are returned as such.
        room: most vectors kept; at least ten more than wanted values.
        storage: half precision halves the memory of the basis; one more product per value then recomputes it.
        vectors: return eigenvectors too.
        further: also the Ritz vectors of so many ranks after the wanted ones, as far as there are any.
        unseen: as in `StoppingRule`; 0 for a start without a random part.

    Raises:
        FloatingPointError: the operator returned a non-finite vector.
    """
    n, room = start.numel(), max(room, k * (2 if which == "both" else 1) + 10)
    steps = min(n, max_steps) if room >= n else max_steps  # n without a restart span everything
    ritz, rule = Projection(start, min(steps, room), storage), StoppingRule(k, which, tol, tol_residual, ends, unseen)
    breakdown, before = 0, np.empty(0)  # products at the last invariant subspace, and the wanted values there
    quadrature: tuple[np.ndarray, np.ndarray] | None = None  # before the first restart
    for products in range(1, steps + 1):
        ritz.extend((yield ritz.basis.last()))
        positions = wanted(ritz.values, k, which)
        if ritz.beta > 0.0:
            done = products - breakdown > min(k, n - 1) and rule.done(ritz.pairs)
        else:
            values = ritz.values[positions]
            done = len(before) == len(values) and bool((np.abs(values - before) <= ritz.floor * ritz.scale).all())
            breakdown, before = products, values
        if done or products == steps:
            break
        if ritz.full:
            quadrature = quadrature or (ritz.values, ritz.start_components() ** 2)
            ritz.restart(worth_keeping(ritz.values, (ritz.room + len(positions)) // 2, which))
        ritz.append_next(start, products)
    return (yield from _spectrum(ritz, rule, positions, quadrature, products, vectors, further))


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, k: int, **options: Any) -> Spectrum:
    """Run one `lanczos_search` with these options, on the products v -> H v."""
    return run_search(product, lanczos_search(start, k, **options))


def _spectrum(
    ritz: Projection,
    rule: StoppingRule,
    positions: np.ndarray,
    quadrature: tuple[np.ndarray, np.ndarray] | None,
    products: int,
    vectors: bool,
    further: int,
) -> Search:
    """The result of a search, after one more product per value where the basis is stored in half precision."""
    components = ritz.start_components()
    values, residuals, errors = (part[positions] for part in (ritz.values, ritz.pairs.residuals, ritz.pairs.errors))
    rows: Tensor | None = None
    next_rows: Tensor | None = None
    if vectors or further or not ritz.basis.exact:
        # The sign LAPACK happens to give is fixed, so that equal searches give equal vectors everywhere.
        coefficients = ritz.vectors * np.where(components < 0, -1.0, 1.0)
        rows = ritz.basis.combinations(coefficients[:, positions])
        if (beyond := next_ranks(rule, ritz.values, further)).size:
            next_rows = ritz.basis.combinations(coefficients[:, beyond])
        ritz.basis.clear()
    if rows is not None and not ritz.basis.exact:
        products += len(positions)
        values, residuals = yield from _rayleigh_quotients(rows, ritz.pairs.least)
        errors = ritz.pairs.recomputed(positions, values, residuals).errors[positions]
    quadrature = quadrature or (ritz.values, components**2)
    found = (values, residuals, errors)
    return summarised(ritz.pairs, rule, found, quadrature, products, rows if vectors else None, next_rows)


def summarised(
    pairs: RitzPairs,
    rule: StoppingRule,
    found: tuple[np.ndarray, np.ndarray, np.ndarray],
    quadrature: tuple[np.ndarray, np.ndarray],
    products: int,
    vectors: Tensor | None,
    further: Tensor | None,
) -> Spectrum:
    """The wanted values with their residuals and errors, both ends of all Ritz pairs, and nodes with their weights."""
    values, residuals, errors = found
    return Spectrum(
        values=values,
        residuals=residuals,
        converged=rule.converged(values, residuals, errors),
        errors=errors,
        largest=float(pairs.values[-1]),
        smallest=float(pairs.values[0]),
        ends=(float(pairs.residuals[-1]), float(pairs.residuals[0])),
        nodes=quadrature[0],
        weights=quadrature[1],
        products=products,
        vectors=vectors,
        further=further,
    )


def next_ranks(rule: StoppingRule, values: np.ndarray, further: int) -> np.ndarray:
    """Positions of the Ritz values of so many ranks after the wanted ones, as far as there are any."""
    positions = wanted(values, rule.k, rule.which)
    return np.array([at for at in wanted(values, rule.k + further, rule.which) if at not in positions], dtype=int)


def run_search(product: Callable[[Tensor], Tensor], search: Search) -> Spectrum:
    """Run one search."""
    vector = next(search)
    try:
        while True:
            vector = search.send(product(vector))
    except StopIteration as end:
        spectrum: Spectrum = end.value
        return spectrum


def worth_keeping(theta: np.ndarray, count: int, which: Which) -> np.ndarray:
    """Positions of the Ritz vectors that a restart keeps: the wanted ones, their neighbours, and both ends."""
    inner = wanted(theta, count // 2 if which == "both" else count, which)
    return np.unique(np.concatenate([inner, [0, len(theta) - 1]]))[: len(theta) - 1]


def _rayleigh_quotients(vectors: Tensor, floor: float) -> Generator[Tensor, Tensor, tuple[np.ndarray, np.ndarray]]:
    """Values and residuals of vectors, which are normalised in place."""
    values, residuals = [], []
    for vector in vectors:
        vector.div_(length(vector).to(vector.dtype))
        w = yield vector
        value = dot(w, vector)
        values.append(value.item())
        residuals.append(max(length(w - value.to(w.dtype) * vector).item(), floor))
    return np.array(values), np.array(residuals)

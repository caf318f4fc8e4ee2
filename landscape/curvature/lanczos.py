"""Extreme eigenvalues of a symmetric operator known only by its products (Lanczos 1950)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.krylov_basis import Basis
from landscape.curvature.vectors import dot, length, random_unit

Search = Generator[Tensor, Tensor, "Spectrum"]  # yields v, is sent H v, returns what was found
Which = Literal["LM", "LA", "SA", "both"]
ROUNDING = {
    torch.float32: 1e-6,
    torch.float64: 1e-13,
}  # residual floor, as a share of the largest |eigenvalue|
ERROR = 0.01  # of tol: the relative error at which a value counts as known, by its estimate min(r, r^2 / gap)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in the order asked for, each with a bound.

    Args:
        values: (k,).
        residuals: ||H v - lambda v||, (k,): an eigenvalue of H lies within it. Includes rounding. Says nothing of
            further copies of a multiple eigenvalue: one start vector finds one.
        converged: residual <= tol |value|, (k,).
        errors: estimates min(r, r^2 / gap) of the errors, gap the distance to the next Ritz value, (k,). Not bounds:
            the gap is known as far as the search went.
        largest: algebraically largest Ritz value, with its residual in `ends`.
        smallest: algebraically smallest one.
        ends: residuals of (largest, smallest).
        nodes: Ritz values, (m,): with `weights` a quadrature of the spectral density (before the first restart).
        weights: (m,), non-negative, sum 1.
        products: operator products spent.
        vectors: (k, n) if asked for, each in the half space of the start vector.
    """

    values: np.ndarray
    residuals: np.ndarray
    converged: np.ndarray
    errors: np.ndarray
    largest: float
    smallest: float
    ends: tuple[float, float]
    nodes: np.ndarray
    weights: np.ndarray
    products: int
    vectors: Tensor | None = None


def lanczos(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    ends: float = 0.1,
    max_steps: int = 200,
    room: int = 200,
    storage: torch.dtype | None = None,
    vectors: bool = False,
) -> Spectrum:
    """The k wanted eigenvalues by Lanczos with full reorthogonalisation, tested at every step.

    Two passes of classical Gram-Schmidt per step ("twice is enough", Giraud et al. 2005) as matrix-vector products
    on the (m, n) basis. A random start is needed: gradient-like starts hide eigenvectors. Where the start's Krylov
    space ends the search goes on beside it, until that no longer changes the wanted values. Where the basis is full
    it is restarted with its best vectors (thick restart, Wu & Simon 2000).

    Args:
        product: v -> H v.
        start: random vector, (n,); its dtype and device are those of the arithmetic.
        k: how many; `both` gives k at each end.
        which: LM largest magnitude, LA largest, SA smallest, both: k largest then k smallest.
        tol: relative residual at which a value counts as converged. The search also goes on until the estimated error
            of every value is a hundredth of that.
        ends: relative residual to which the two algebraic ends are followed too, or to tol of the largest |value|:
            near zero nothing relative is ever reached. The error of a value is about the square of its residual, so
            0.1 leaves them right to about one per cent, for about one product; 1.0 asks nothing of them.
        max_steps: cap on the number of products, at least k; what is unconverged then is returned as such.
        room: most vectors kept, above the number of wanted values by ten at least.
        storage: half precision halves the memory of the basis; values and residuals are then measured anew with their
            vectors, by one more product each.
        vectors: return eigenvectors too.

    Raises:
        FloatingPointError: the operator returned a non-finite vector.
    """
    search = searching(
        start, k, which=which, tol=tol, ends=ends, max_steps=max_steps, room=room, storage=storage, vectors=vectors
    )
    vector = next(search)
    while True:
        try:
            vector = search.send(product(vector))
        except StopIteration as end:
            found: Spectrum = end.value
            return found


def searching(
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float = 1e-3,
    ends: float = 0.1,
    max_steps: int = 200,
    room: int = 200,
    storage: torch.dtype | None = None,
    vectors: bool = False,
) -> Search:
    """The search of `lanczos`, which asks for one product at a time: several may go on side by side."""
    n = start.numel()
    room = max(room, k * (2 if which == "both" else 1) + 10)
    steps = min(n, max_steps) if room >= n else max_steps  # n without a restart span everything
    most = min(steps, room)
    basis = Basis(start, most, storage)
    matrix = np.zeros((most, most))  # the operator on the basis: tridiagonal, but for the arrow that a restart leaves
    origin = np.eye(most)[0]  # the start vector on the basis
    floor = ROUNDING.get(start.dtype, 1e-6)
    begun = 0  # products spent on invariant subspaces, complete
    before: np.ndarray | None = None  # the wanted values after the last of them
    quadrature: tuple[np.ndarray, np.ndarray] | None = None  # before the first restart
    for products in range(1, steps + 1):
        w = yield basis.last()
        m = len(basis)
        alpha = dot(w, basis.last())
        w = basis.orthogonal(w)
        alpha_value, beta = torch.stack([alpha, length(w)]).tolist()
        if not np.isfinite(alpha_value) or not np.isfinite(beta):
            raise FloatingPointError("a Hessian product is not finite")
        matrix[m - 1, m - 1] = alpha_value
        theta, s = np.linalg.eigh(matrix[:m, :m])  # s: (basis, value)
        scale = float(np.abs(theta).max()) or 1.0
        if beta <= floor * scale:
            beta = 0.0  # an invariant subspace: its values are exact
        residuals = np.maximum(beta * np.abs(s[-1]), floor * scale if n > 1 else 0.0)
        chosen = wanted(theta, k, which)
        if beta > 0.0:
            done = products - begun > min(k, n - 1) and _settled(theta, residuals, chosen, which, tol, ends, floor)
        else:
            done = _same(theta[chosen], before, floor * scale)
            begun, before = products, theta[chosen]
        if done or products == steps:
            break
        if m == most:
            quadrature = quadrature or (theta, (origin @ s) ** 2)
            kept = _worth_keeping(theta, (most + len(chosen)) // 2, which)
            basis.keep(s[:, kept])
            m = len(kept)
            origin = np.append(origin @ s[:, kept], np.zeros(most - m))
            matrix = np.diag(np.append(theta[kept], np.zeros(most - m)))
            matrix[m, :m] = matrix[:m, m] = beta * s[-1, kept]
        else:
            matrix[m, m - 1] = matrix[m - 1, m] = beta
        basis.append(w / beta if beta > 0.0 else _beside(basis, start, products))
    towards = origin[:m] @ s
    nodes, weights = quadrature or (theta, towards**2)
    values, bounds = theta[chosen], residuals[chosen]
    found: Tensor | None = None
    if vectors or not basis.exact:
        # The sign LAPACK happens to give is fixed, so that the same question has the same answer everywhere.
        found = basis.combinations((s * np.where(towards < 0, -1.0, 1.0))[:, chosen])
    if found is not None and not basis.exact:
        products += len(chosen)
        values, bounds = yield from _measured(found, floor * scale)
    return Spectrum(
        values=values,
        residuals=bounds,
        converged=bounds <= tol * np.abs(values),
        errors=_estimated(theta, residuals, chosen),
        largest=float(theta[-1]),
        smallest=float(theta[0]),
        ends=(float(residuals[-1]), float(residuals[0])),
        nodes=nodes,
        weights=weights,
        products=products,
        vectors=found if vectors else None,
    )


def side_by_side(product: Callable[[Tensor], Tensor], searches: Sequence[Search]) -> list[Spectrum | None]:
    """Several searches with one product for all of them; None for one whose operator is not finite.

    Args:
        product: rows v_i -> H_i v_i, (searches, n) -> (searches, n). The rows of searches that have ended are zero.
        searches: not yet begun.
    """
    found: list[Spectrum | None] = [None] * len(searches)
    vectors = torch.stack([next(search) for search in searches])
    active = set(range(len(searches)))
    while active:
        products = product(vectors)
        for i in sorted(active):
            try:
                vectors[i] = searches[i].send(products[i])
                continue
            except StopIteration as end:
                found[i] = end.value
            except FloatingPointError:
                found[i] = None
            vectors[i] = 0.0
            active.discard(i)
    return found


def wanted(values: np.ndarray, k: int, which: Which) -> np.ndarray:
    """Positions of the wanted values among ascending ones, in the order of the request."""
    order = np.argsort(values, kind="stable")
    if which == "LM":
        return np.argsort(-np.abs(values), kind="stable")[:k]
    if which == "LA":
        return order[::-1][:k]
    if which == "SA":
        return order[:k]
    return np.concatenate([order[::-1][:k], order[:k]])


def _settled(
    theta: np.ndarray, residuals: np.ndarray, chosen: np.ndarray, which: Which, tol: float, ends: float, floor: float
) -> bool:
    size = np.abs(theta)
    least = floor * size.max()
    known = residuals[chosen] <= np.maximum(tol * size[chosen], least)
    known &= _estimated(theta, residuals, chosen) <= np.maximum(ERROR * tol * size[chosen], least)
    if which == "LM" and known.all() and _contested(theta, residuals, chosen, ERROR * tol, least):
        return False
    if ends >= 1.0:
        return bool(known.all())
    both = np.array([0, len(theta) - 1])
    near = residuals[both] <= np.maximum(ends * size[both], max(tol, floor) * size.max())
    return bool(known.all() and near.all())


def _contested(theta: np.ndarray, residuals: np.ndarray, chosen: np.ndarray, tol: float, least: float) -> bool:
    """Whether an unknown value of the other sign may yet turn out larger than the smallest of the wanted ones."""
    last = theta[chosen[-1]]
    others = np.setdiff1d(np.flatnonzero(theta * last < 0), chosen)
    if not len(others):
        return False
    rival = others[np.abs(theta[others]).argmax()]
    error = _estimated(theta, residuals, np.array([rival]))[0]
    return bool(error > max(tol * abs(last), least) and abs(theta[rival]) + error > abs(last))


def _estimated(theta: np.ndarray, residuals: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    distances = np.abs(theta[chosen][:, None] - theta)  # (chosen, m)
    distances[np.arange(len(chosen)), chosen] = np.inf
    found = residuals[chosen]
    return np.asarray(np.minimum(found, found**2 / np.maximum(distances.min(axis=1), 1e-300)))


def _same(values: np.ndarray, before: np.ndarray | None, floor: float) -> bool:
    return before is not None and len(before) == len(values) and bool((np.abs(values - before) <= floor).all())


def _worth_keeping(theta: np.ndarray, count: int, which: Which) -> np.ndarray:
    """Positions of the Ritz vectors that a restart keeps: of those asked for and next to them, and both ends."""
    inner = wanted(theta, count // 2 if which == "both" else count, which)
    return np.unique(np.concatenate([inner, [0, len(theta) - 1]]))[: len(theta) - 1]


def _beside(basis: Basis, start: Tensor, seed: int) -> Tensor:
    """A unit vector orthogonal to the basis, to go on from an invariant subspace."""
    vector = basis.orthogonal(random_unit(start.numel(), seed, device=start.device, dtype=start.dtype))
    return vector.div_(length(vector).to(vector.dtype))


def _measured(vectors: Tensor, floor: float) -> Generator[Tensor, Tensor, tuple[np.ndarray, np.ndarray]]:
    """Rayleigh quotients and residuals of vectors, which are normalised in place."""
    values, residuals = [], []
    for vector in vectors:
        vector.div_(length(vector).to(vector.dtype))
        w = yield vector
        value = dot(w, vector)
        values.append(value.item())
        residuals.append(max(length(w - value.to(w.dtype) * vector).item(), floor))
    return np.array(values), np.array(residuals)

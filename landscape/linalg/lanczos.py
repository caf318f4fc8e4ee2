"""Extreme eigenvalues of a symmetric operator known only by its products (Lanczos 1950)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

Which = Literal["LM", "LA", "SA", "both"]
ROUNDING = {
    torch.float32: 1e-6,
    torch.float64: 1e-13,
}  # residual floor, as a share of the largest |eigenvalue|


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in the order asked for, each with a bound.

    Args:
        values: (k,).
        residuals: ||H v - lambda v||, (k,): an eigenvalue of H lies within it. Includes rounding. Says nothing of
            further copies of a multiple eigenvalue: one start vector finds one.
        converged: residual <= tol |value|, (k,).
        largest: algebraically largest Ritz value, with its residual in `ends`.
        smallest: algebraically smallest one.
        ends: residuals of (largest, smallest).
        nodes: all Ritz values, (m,): with `weights` a quadrature of the spectral density.
        weights: (m,), non-negative, sum 1.
        products: operator products spent.
        vectors: (k, n) if asked for, each in the half space of the start vector.
    """

    values: np.ndarray
    residuals: np.ndarray
    converged: np.ndarray
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
    ends: float = 0.03,
    max_steps: int = 200,
    vectors: bool = False,
) -> Spectrum:
    """The k wanted eigenvalues by Lanczos with full reorthogonalisation, tested at every step.

    Two passes of classical Gram-Schmidt per step ("twice is enough", Giraud et al. 2005) as matrix-vector products
    on the (m, n) basis. A random start is needed: gradient-like starts hide eigenvectors. Where the start's Krylov
    space ends the search goes on beside it, until that no longer changes the wanted values.

    Args:
        product: v -> H v.
        start: random vector, (n,); its dtype and device are those of the basis.
        k: how many; `both` gives k at each end.
        which: LM largest magnitude, LA largest, SA smallest, both: k largest then k smallest.
        tol: relative residual at which a value counts as converged.
        ends: relative residual to which the two algebraic ends are followed too, or to tol of the largest |value|:
            near zero nothing relative is ever reached. The error of a value is about the square of its residual, so
            0.03 leaves them right to three digits, for about two products; 1.0 asks nothing of them.
        max_steps: cap on the number of products, at least k; what is unconverged then is returned as such.
        vectors: return eigenvectors too.

    Raises:
        FloatingPointError: the operator returned a non-finite vector.
    """
    n = start.numel()
    steps = min(n, max_steps)
    basis = torch.empty(min(steps, 32) + 1, n, dtype=start.dtype, device=start.device)
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    floor = ROUNDING.get(start.dtype, 1e-6)
    begun = 0  # products spent on invariant subspaces, complete
    before: np.ndarray | None = None  # the wanted values after the last of them
    for m in range(1, steps + 1):
        if m == len(basis):
            basis = torch.cat([basis, basis.new_empty(min(32, steps + 1 - m), n)])
        w = product(basis[m - 1])
        alpha = torch.dot(w, basis[m - 1])
        for _ in range(2):
            w = w - basis[:m].T @ (basis[:m] @ w)
        alpha_value, beta = torch.stack([alpha, w.norm()]).tolist()
        if not np.isfinite(alpha_value) or not np.isfinite(beta):
            raise FloatingPointError("a Hessian product is not finite")
        alphas.append(alpha_value)
        theta, s = eigh_tridiagonal(np.array(alphas), np.array(betas))
        scale = float(np.abs(theta).max()) or 1.0
        if beta <= floor * scale:
            beta = 0.0  # an invariant subspace: its values are exact
        residuals = np.maximum(beta * np.abs(s[-1]), floor * scale if n > 1 else 0.0)
        chosen = wanted(theta, k, which)
        if beta > 0.0:
            done = m - begun > min(k, n - 1) and _settled(theta, residuals, chosen, tol, ends, floor)
        else:
            done = _same(theta[chosen], before, floor * scale)
            begun, before = m, theta[chosen]
        if done or m == steps:
            break
        if m < len(basis):
            basis[m] = w / beta if beta > 0.0 else _fresh(basis[:m], m)
        betas.append(beta)
    values = theta[chosen]
    found = residuals[chosen]
    return Spectrum(
        values=values,
        residuals=found,
        converged=found <= tol * np.abs(values),
        largest=float(theta[-1]),
        smallest=float(theta[0]),
        ends=(float(residuals[-1]), float(residuals[0])),
        nodes=theta,
        weights=s[0] ** 2,
        products=m,
        vectors=_vectors(basis[:m], s[:, chosen]) if vectors else None,
    )


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
    theta: np.ndarray, residuals: np.ndarray, chosen: np.ndarray, tol: float, ends: float, floor: float
) -> bool:
    size = np.abs(theta)
    exact = residuals[chosen] <= np.maximum(tol * size[chosen], floor * size.max())
    if ends >= 1.0:
        return bool(exact.all())
    both = np.array([0, len(theta) - 1])
    near = residuals[both] <= np.maximum(ends * size[both], max(tol, floor) * size.max())
    return bool(exact.all() and near.all())


def _same(values: np.ndarray, before: np.ndarray | None, floor: float) -> bool:
    return before is not None and len(before) == len(values) and bool((np.abs(values - before) <= floor).all())


def _fresh(basis: Tensor, seed: int) -> Tensor:
    """A unit vector orthogonal to the basis, to go on from an invariant subspace."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(basis.shape[1], generator=generator, dtype=torch.float32).to(basis)
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector.div_(vector.norm())


def _vectors(basis: Tensor, s: np.ndarray) -> Tensor:
    # The sign LAPACK happens to give is fixed, so that the same question has the same answer everywhere.
    s = s * np.where(s[0] < 0, -1.0, 1.0)
    return torch.from_numpy(s.T.copy()).to(basis) @ basis

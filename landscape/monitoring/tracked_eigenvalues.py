"""Largest eigenvalues of an operator that changes slowly: each search begins with the last vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, lanczos
from landscape.curvature.spectrum import memory
from landscape.products.vectors import length, random_unit

NEXT, RANDOM = 0.3, 0.3  # lengths of the next Ritz vector and of a random one in a start from the last eigenvectors
UNSURE = 100.0  # so much larger a hidden component may be than in a search from a random start: one standard deviation


@dataclass(frozen=True)
class Found:
    """The largest eigenvalues, in descending order."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # ||H v - lambda v||, (k,)
    errors: np.ndarray  # estimated errors min(r, r^2 / gap) of the values, (k,)
    converged: np.ndarray  # (k,)
    warm_error: float  # where checked: share of the largest by which the search from the last vectors missed it
    products: int


@dataclass
class TrackedEigenvalues:
    """Searches for the k algebraically largest eigenvalues of one matrix after the other.

    A search begins with the sum of the last eigenvectors, a part of the next Ritz vector, whose value may have become
    the largest, and a random part. It ends only when that part makes it unlikely that an eigenvalue further out is
    hidden (`stopping.StoppingRule`): from the last eigenvectors alone it would end there, with a small residual, also
    when several others have overtaken them, as happens at the edge of stability. The first search, and every one that
    is to be checked, begins with a random vector and has to be surer; of a checked one the search from the last vectors
    is made too, and `warm_error` says by how much its largest value was off.
    """

    k: int
    tol: float  # largest estimated relative error of a value
    max_products: int
    seed: int
    _vectors: Tensor | None = field(default=None, init=False)
    _next: Tensor | None = field(default=None, init=False)  # that of the rank after them, (n,)
    _searches: int = field(default=0, init=False)

    def search(self, product: Callable[[Tensor], Tensor], like: Tensor, size: int, *, check: bool) -> Found:
        """The eigenvalues of the operator v -> H v with `size` rows, on the device and in the dtype of `like`.

        One that is not finite has NaN, and is not converged.
        """
        self._searches += 1
        drawn = random_unit(size, self.seed + self._searches, device=like.device, dtype=like.dtype)
        known = self._vectors if self._vectors is not None and self._vectors.shape[1] == size else None
        try:
            if known is None:
                return self._kept(self._lanczos(product, drawn, unseen=1.0), np.nan, 0)
            mixed = known.sum(dim=0) + RANDOM * drawn
            mixed = mixed if self._next is None else mixed.add_(self._next, alpha=NEXT)
            warm = self._lanczos(product, mixed, unseen=UNSURE * RANDOM / length(mixed).item())
            if not check:
                return self._kept(warm, np.nan, 0)
            cold = self._lanczos(product, drawn, unseen=1.0)
            top = float(cold.values[0])
            missed = (top - float(warm.values[0])) / abs(top) if top else np.nan
            return self._kept(cold if missed >= 0 else warm, missed, (warm if missed >= 0 else cold).products)
        except FloatingPointError:
            self._vectors = None
            nothing = np.full(self.k, np.nan)
            return Found(nothing, nothing, nothing, np.zeros(self.k), np.nan, 0)

    def _lanczos(self, product: Callable[[Tensor], Tensor], start: Tensor, *, unseen: float) -> Spectrum:
        room, storage = memory(start)
        k = min(self.k, start.numel())
        return lanczos(
            product, start, k, which="LA", tol=self.tol, max_steps=max(self.max_products, k + 1), room=room,
            storage=storage, vectors=True, further=1, unseen=unseen,
        )  # fmt: skip

    def _kept(self, found: Spectrum, warm_error: float, more: int) -> Found:
        """The values of a search, whose vectors the next one begins with; `more` products were made by another one."""
        assert found.vectors is not None
        self._vectors = found.vectors.clone()
        self._next = None if found.further is None else found.further[0].clone()
        lacking = (0, self.k - len(found.values))
        values, residuals, errors, converged = (
            np.pad(np.asarray(part, float), lacking, constant_values=np.nan)
            for part in (found.values, found.residuals, found.errors, found.converged)
        )
        return Found(values, residuals, errors, converged, warm_error, found.products + more)

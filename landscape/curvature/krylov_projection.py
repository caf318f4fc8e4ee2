"""A symmetric operator projected on a Krylov basis that grows by a vector per product, and its Ritz pairs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.krylov_basis import Basis
from landscape.curvature.stopping import RitzPairs
from landscape.curvature.vectors import dot, length, random_unit

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}  # residual floor, as a share of the largest |eigenvalue|
NOT_FINITE = "a Hessian product is not finite"


class Projection:
    """The projected operator: after every `extend` with its Ritz pairs; see `Basis`."""

    def __init__(self, start: Tensor, room: int, storage: torch.dtype | None) -> None:
        self.basis, self.room = Basis(start, room, storage), room
        self.floor = ROUNDING.get(start.dtype, 1e-6)
        self._matrix = np.zeros((room, room))  # tridiagonal, except for the arrow that a restart leaves
        self._start = np.eye(room)[0]  # the start vector on the basis
        self._origin: int | None = 0  # row of the random vector that spans the Krylov space; None after a restart
        self._size = start.numel()

    def extend(self, image: Tensor) -> None:
        """Take the image of the last basis vector under the operator, and update all Ritz pairs."""
        m = len(self.basis)
        alpha = dot(image, self.basis.last())
        self._next = self.basis.orthogonal(image)
        alpha_value, self.beta = torch.stack([alpha, length(self._next)]).tolist()
        if not np.isfinite(alpha_value) or not np.isfinite(self.beta):
            raise FloatingPointError(NOT_FINITE)
        self._matrix[m - 1, m - 1] = alpha_value
        self.values, self.vectors = np.linalg.eigh(self._matrix[:m, :m])  # vectors: (basis, value)
        self.scale = float(np.abs(self.values).max()) or 1.0
        if self.beta <= self.floor * self.scale:
            self.beta = 0.0  # an invariant subspace: its values are exact
        random = None if self._origin is None else self.vectors[self._origin]
        self.pairs = RitzPairs(self.values, self.beta * self.vectors[-1], random, self._size, self.floor)
        self._coupling = np.append(np.zeros(m - 1), self.beta)  # of the next basis vector to the existing ones

    @property
    def full(self) -> bool:
        return len(self.basis) == self.room

    def start_components(self) -> np.ndarray:
        """The start vector on the Ritz vectors."""
        components: np.ndarray = self._start[: len(self.basis)] @ self.vectors
        return components

    def restart(self, kept: np.ndarray) -> None:
        """Replace the basis by some of the Ritz vectors."""
        empty = np.zeros(self.room - len(kept))
        self.basis.keep(self.vectors[:, kept])
        self._start = np.append(self._start @ self.vectors[:, kept], empty)
        self._matrix = np.diag(np.append(self.values[kept], empty))
        self._coupling = self.beta * self.vectors[-1, kept]
        self._origin = None

    def append_next(self, start: Tensor, seed: int) -> None:
        """Add the next Lanczos vector; on breakdown a random unit vector orthogonal to the basis."""
        m = len(self.basis)
        self._matrix[m, :m] = self._matrix[:m, m] = self._coupling
        following, self._next = self._next, self._next.new_empty(0)  # its memory is free during the next product
        if self.beta > 0.0:
            self.basis.append(following.div_(self.beta))
            return
        vector = self.basis.orthogonal(random_unit(start.numel(), seed, device=start.device, dtype=start.dtype))
        self.basis.append(vector.div_(length(vector).to(vector.dtype)))
        self._origin = None if self._origin is None else m

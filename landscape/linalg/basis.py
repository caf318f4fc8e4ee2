"""Orthonormal rows in memory that is reserved as they come, perhaps in half precision."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from landscape.linalg.vector import length

GROWTH = 32  # rows reserved at once
BLOCK = 2**20  # columns converted at once where rows are stored in another precision


class Basis:
    """Up to `room` orthonormal rows of length n.

    Rows in half precision are scaled by sqrt(n), so that their entries are about 1 and nothing of them underflows; the
    arithmetic on them stays that of the vectors given.

    Args:
        start: the first row is this vector, normalised; its dtype and device are those of the arithmetic.
        room: most rows ever held.
        storage: dtype of the rows; None keeps that of `start`.
    """

    def __init__(self, start: Tensor, room: int, storage: torch.dtype | None = None) -> None:
        self._dtype, self._storage = start.dtype, storage or start.dtype
        self.exact = self._storage == self._dtype
        self._scale = 1.0 if self.exact else math.sqrt(start.numel())
        self._room = room
        self._rows = torch.empty(min(room, GROWTH), start.numel(), dtype=self._storage, device=start.device)
        self._count = 0
        self.append(start / length(start).to(start.dtype))

    def __len__(self) -> int:
        return self._count

    def last(self) -> Tensor:
        """The newest row, (n,): what was stored of it."""
        row = self._rows[self._count - 1]
        return row if self.exact else row.to(self._dtype).div_(self._scale)

    def append(self, row: Tensor) -> None:
        """Store one more row, (n,)."""
        if self._count == len(self._rows):
            more = self._rows.new_empty(min(GROWTH, self._room - self._count), self._rows.shape[1])
            self._rows = torch.cat([self._rows, more])
        self._rows[self._count] = row if self.exact else row * self._scale
        self._count += 1

    def orthogonal(self, vector: Tensor) -> Tensor:
        """What of a vector lies beside all rows, by two passes of classical Gram-Schmidt, (n,)."""
        for _ in range(2):
            vector = vector - self._combined(self._inner(vector))
        return vector

    def combinations(self, coefficients: np.ndarray) -> Tensor:
        """Combinations of the rows, (k, n), from coefficients (rows, k)."""
        weights = torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._rows.device, self._dtype)
        if self.exact:
            return weights @ self._rows[: self._count]
        return torch.stack([self._combined(row) for row in weights])

    def keep(self, coefficients: np.ndarray) -> None:
        """Replace the rows by combinations of them, in place and block by block: no second basis is needed."""
        weights = torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._rows.device, self._dtype)
        held, kept = self._count, len(weights)
        for at in range(0, self._rows.shape[1], BLOCK):
            columns = self._rows[:held, at : at + BLOCK]
            self._rows[:kept, at : at + BLOCK] = (weights @ columns.to(self._dtype)).to(self._storage)
        self._count = kept

    def _inner(self, vector: Tensor) -> Tensor:
        rows = self._rows[: self._count]
        if self.exact:
            return rows @ vector
        products = [
            rows[:, at : at + BLOCK].to(self._dtype) @ vector[at : at + BLOCK] for at in range(0, len(vector), BLOCK)
        ]
        return torch.stack(products).sum(dim=0).div_(self._scale)

    def _combined(self, weights: Tensor) -> Tensor:
        rows = self._rows[: self._count]
        if self.exact:
            return rows.T @ weights
        blocks = [rows[:, at : at + BLOCK].to(self._dtype).T @ weights for at in range(0, rows.shape[1], BLOCK)]
        return torch.cat(blocks).div_(self._scale)

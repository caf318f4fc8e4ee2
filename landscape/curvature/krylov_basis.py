"""An orthonormal basis that grows row by row, in half precision if memory is short."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.vectors import length

GROWTH = 32  # rows allocated at once
BLOCK = 2**22  # entries converted at once, for any number of rows, so that freed memory is reused


class Basis:
    """Up to `room` orthonormal rows of length n, the first being `start`, normalised.

    Arithmetic stays in the dtype and on the device of `start`, whatever the `storage` dtype of the rows. Rows in half
    precision are scaled by sqrt(n), so that their entries are about 1 and do not underflow.
    """

    def __init__(self, start: Tensor, room: int, storage: torch.dtype | None = None) -> None:
        self._dtype, self._storage = start.dtype, storage or start.dtype
        self.exact = self._storage == self._dtype
        self._scale = 1.0 if self.exact else math.sqrt(start.numel())
        self._room, self._size = room, start.numel()
        self._device = start.device
        self._blocks: list[Tensor] = []  # of GROWTH rows each, so that growing copies nothing
        self._count = 0
        self.append(start / length(start).to(start.dtype))

    def __len__(self) -> int:
        return self._count

    def last(self) -> Tensor:
        """The newest row as stored, (n,)."""
        row = self._row(self._count - 1)
        return row if self.exact else row.to(self._dtype).div_(self._scale)

    def append(self, row: Tensor) -> None:
        """Store one more row, (n,)."""
        if self._count == GROWTH * len(self._blocks):
            rows = min(GROWTH, self._room - self._count)
            self._blocks.append(torch.empty(rows, self._size, dtype=self._storage, device=self._device))
        self._count += 1
        self._row(self._count - 1).copy_(row if self.exact else row * self._scale)

    def orthogonal(self, vector: Tensor) -> Tensor:
        """The part of a vector orthogonal to all rows, by two passes of classical Gram-Schmidt, (n,)."""
        for _ in range(2):
            vector = vector - self._combined(self._inner(vector))
        return vector

    def combinations(self, coefficients: np.ndarray) -> Tensor:
        """Linear combinations of the rows, (k, n), from coefficients (rows, k)."""
        weights = self._weights(coefficients)
        if self.exact:
            parts = [weights[:, at : at + GROWTH] @ rows for at, rows in self._filled()]
            return functools.reduce(torch.add, parts)
        rows = torch.empty(len(weights), self._size, dtype=self._dtype, device=self._device)
        for row, own in zip(rows, weights, strict=True):
            row.copy_(self._combined(own))
        return rows

    def keep(self, coefficients: np.ndarray) -> None:
        """Replace the rows by linear combinations, in place and some columns at a time, without a second basis."""
        weights = self._weights(coefficients)
        width = max(1, BLOCK // self._count)
        for at in range(0, self._size, width):
            columns = torch.cat([rows[:, at : at + width] for _, rows in self._filled()])
            kept = (weights @ columns.to(self._dtype)).to(self._storage)
            for k, row in enumerate(kept):
                self._row(k)[at : at + width] = row
        self._count = len(weights)

    def clear(self) -> None:
        """Forget all rows and free their memory."""
        self._blocks, self._count = [], 0

    def _row(self, i: int) -> Tensor:
        return self._blocks[i // GROWTH][i % GROWTH]

    def _filled(self) -> list[tuple[int, Tensor]]:
        """The rows in use by block, each with the index of its first row."""
        starts = range(0, self._count, GROWTH)
        return [(at, block[: self._count - at]) for at, block in zip(starts, self._blocks, strict=False)]

    def _weights(self, coefficients: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(coefficients.T)).to(self._device, self._dtype)

    def _inner(self, vector: Tensor) -> Tensor:
        inner = torch.mv if self.exact else _inner_of
        products = torch.cat([inner(rows, vector) for _, rows in self._filled()])
        return products if self.exact else products.div_(self._scale)

    def _combined(self, weights: Tensor) -> Tensor:
        combine = torch.mv if self.exact else _combined_of
        parts = [combine(rows.T, weights[at : at + GROWTH]) for at, rows in self._filled()]
        combination = functools.reduce(torch.add, parts)
        return combination if self.exact else combination.div_(self._scale)


def _inner_of(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products of rows with a vector in the precision of the vector, some columns at a time."""
    width = max(1, BLOCK // len(rows))
    pieces = zip(torch.split(rows, width, dim=1), torch.split(vector, width), strict=True)
    parts = [part.to(vector.dtype) @ x for part, x in pieces]
    return torch.stack(parts).sum(dim=0)


def _combined_of(columns: Tensor, weights: Tensor) -> Tensor:
    """Linear combinations of columns (n, rows) in the precision of the weights, some entries at a time."""
    width = max(1, BLOCK // len(weights))
    return torch.cat([part.to(weights.dtype) @ weights for part in torch.split(columns, width)])

"""Orthonormal bases of several searches in one tensor, extended and orthogonalised with a few kernels for all."""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.products.vectors import GROWTH, dot, length

SLICE = 8192  # entries of a vector that one product of a batch takes on a GPU
BLOCK = 2**25  # entries converted to another precision, or combined in place, at once
CPU_BLOCK = 2**20


class Basis:
    """Up to `room` orthonormal rows of length n for each of M searches, the first being the normalised `starts`.

    On a GPU a vector is cut into slices, and every inner product or combination is one batched matrix product over
    (search, slice): one with few rows of millions of entries may leave most of a GPU idle (not measured). Inner
    products of slices are summed in float64. On a CPU the searches follow each other, which is 3 to 6 times as fast as
    a batched product there. The arithmetic stays in the dtype and on the device of `starts`; rows in half precision are
    scaled by sqrt(n), so that their entries are about 1 and do not underflow. A row of zeros (of a search that is
    finished or waits) changes nothing.

    Args:
        starts: random vectors, (M, n).
        room: most rows per search.
        storage: dtype of the stored rows; None is that of `starts`.
        slice_length: entries per slice; None chooses it by the device.
    """

    def __init__(
        self, starts: Tensor, room: int, storage: torch.dtype | None = None, *, slice_length: int | None = None
    ) -> None:
        self.searches, self._size = starts.shape
        self._dtype, self._storage, self._device = starts.dtype, storage or starts.dtype, starts.device
        self.exact = self._storage == self._dtype
        self._scale = 1.0 if self.exact else math.sqrt(self._size)
        self._room, self._count = room, 0
        on_cpu = starts.device.type == "cpu"
        whole = on_cpu and self.exact  # a slice is the least that is converted at once
        self._length = min(slice_length or (self._size if whole else SLICE), self._size)
        self._slices = -(-self._size // self._length)
        self._looped = on_cpu and slice_length is None
        self._most = CPU_BLOCK if on_cpu else BLOCK
        self._blocks: list[Tensor] = []  # (searches * slices, GROWTH, slice length), so that growing copies nothing
        self._last: Tensor | None = None  # the newest rows, where they are no view of what is stored
        self.append(starts / lengths(starts)[:, None].to(starts.dtype))

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether there is no room for another row."""
        return self._count == self._room

    @property
    def last(self) -> Tensor:
        """The newest row of every search as stored, (M, n)."""
        at = self._count - 1
        return self._blocks[at // GROWTH][:, at % GROWTH] if self._last is None else self._last

    def append(self, rows: Tensor) -> None:
        """Store one more row per search, (M, n)."""
        if self._count == GROWTH * len(self._blocks):
            count = min(GROWTH, self._room - self._count)
            shape = (self.searches * self._slices, count, self._length)
            self._blocks.append(torch.empty(shape, dtype=self._storage, device=self._device))
        stored = self._sliced(rows if self.exact else rows * self._scale).to(self._storage)
        self._blocks[self._count // GROWTH][:, self._count % GROWTH] = stored
        self._count += 1
        if not self.exact:
            self._last = self._joined(stored.to(self._dtype)).div_(self._scale)
        elif self._slices > 1:
            self._last = rows

    def orthogonal(self, vectors: Tensor) -> Tensor:
        """The part of every vector orthogonal to the rows of its search, by two passes of Gram-Schmidt, (M, n)."""
        rest = self._sliced(vectors).clone()
        for _ in range(2):
            inner = [self._inner(rows, rest) for rows in self._filled()]
            for rows, weights in zip(self._filled(), inner, strict=True):
                self._subtract(rows, weights / self._scale**2, rest)
        return self._joined(rest)

    def combinations(self, search: int, coefficients: np.ndarray) -> Tensor:
        """Linear combinations of the rows of one search, (k, n), from coefficients (rows, k)."""
        weights = self._on_device(coefficients.T / self._scale)
        slices = slice(search * self._slices, (search + 1) * self._slices)
        total = torch.zeros(len(weights), self._slices * self._length, dtype=self._dtype, device=self._device)
        for at, rows in enumerate(self._filled()):
            part = weights[:, at * GROWTH : at * GROWTH + rows.shape[1]]
            sums = total.view(len(weights), self._slices, self._length).transpose(0, 1)
            for piece, sum_ in self._pieces(rows[slices], sums):
                sum_ += part @ piece
        return total[:, : self._size]

    def keep(self, coefficients: np.ndarray) -> None:
        """Replace the rows of every search by linear combinations, coefficients (M, rows, kept), in place.

        Some columns at a time, so that there is no second basis.
        """
        weights = self._on_device(coefficients.transpose(0, 2, 1)).repeat_interleave(self._slices, dim=0)
        kept = weights.shape[1]
        width = max(1, min(self._length, self._most // self._count))
        step = max(1, self._most // (self._count * width))
        for at in range(0, len(weights), step):
            for left in range(0, self._length, width):
                part, columns = slice(at, at + step), slice(left, left + width)
                rows = torch.cat([block[part, :, columns].to(self._dtype) for block in self._filled()], dim=1)
                combined = torch.bmm(weights[part], rows).to(self._storage)
                for first, block in zip(range(0, kept, GROWTH), self._blocks, strict=False):
                    block[part, : min(kept - first, block.shape[1]), columns] = combined[:, first : first + GROWTH]
        self._count = kept

    def clear(self) -> None:
        """Forget all rows and free their memory."""
        self._blocks, self._count, self._last = [], 0, None

    def _filled(self) -> list[Tensor]:
        """The rows in use, by block."""
        starts = range(0, self._count, GROWTH)
        return [block[:, : self._count - at] for at, block in zip(starts, self._blocks, strict=False)]

    def _sliced(self, vectors: Tensor) -> Tensor:
        """(M, n) to (M * slices, slice length), padded with zeros."""
        lacking = self._slices * self._length - self._size
        return (F.pad(vectors, (0, lacking)) if lacking else vectors).reshape(-1, self._length)

    def _joined(self, slices: Tensor) -> Tensor:
        return slices.reshape(self.searches, -1)[:, : self._size]

    def _pieces(self, rows: Tensor, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows in the dtype of the arithmetic with the vectors they meet: some slices at a time if they convert."""
        step = len(rows) if self.exact else max(1, self._most // (rows.shape[1] * self._length))
        for piece, vector in zip(torch.split(rows, step), torch.split(vectors, step), strict=True):
            yield piece.to(self._dtype), vector

    def _inner(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Inner products of stored rows (M * slices, rows, length) with vectors (M * slices, length), (M, rows)."""
        parts: list[Tensor] = []
        for piece, vector in self._pieces(rows, vectors):
            if self._looped:
                parts += [torch.mv(one, v)[None] for one, v in zip(piece, vector, strict=True)]
            else:
                parts.append(torch.bmm(piece, vector[:, :, None])[:, :, 0])
        sums = torch.cat(parts).view(self.searches, self._slices, -1).sum(dim=1, dtype=torch.float64)
        return sums.to(self._dtype)

    def _subtract(self, rows: Tensor, weights: Tensor, vectors: Tensor) -> None:
        """Subtract combinations of stored rows, weights (M, rows), from vectors in place."""
        of_slices = weights.repeat_interleave(self._slices, dim=0)
        at = 0
        for piece, vector in self._pieces(rows, vectors):
            part, at = of_slices[at : at + len(piece)], at + len(piece)
            if self._looped:
                for one, v, w in zip(piece, vector, part, strict=True):
                    v.sub_(torch.mv(one.T, w))
            else:
                vector[:, None].baddbmm_(part[:, None], piece, alpha=-1)

    def _on_device(self, coefficients: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(coefficients)).to(self._device, self._dtype)


def lengths(vectors: Tensor) -> Tensor:
    """||vector|| of every row, summed in float64, (M,)."""
    if vectors.device.type == "cpu":
        return torch.stack([length(row) for row in vectors])
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)
    return norms


def dots(left: Tensor, right: Tensor) -> Tensor:
    """<left, right> of every row, summed in float64 some columns at a time, (M,)."""
    if left.device.type == "cpu":
        return torch.stack([dot(a, b) for a, b in zip(left, right, strict=True)])
    width = max(1, BLOCK // len(left))
    pairs = zip(torch.split(left, width, dim=1), torch.split(right, width, dim=1), strict=True)
    return torch.stack([(a.double() * b.double()).sum(dim=1) for a, b in pairs]).sum(dim=0)

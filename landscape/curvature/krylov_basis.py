"""Orthonormal bases of several searches in one tensor, and operators projected on them with their Ritz pairs."""

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from landscape.curvature.stopping import RitzPairs, StoppingRule, wanted
from landscape.products.vectors import GROWTH, dot, length


class Projection:
    """The projected operator of one search, and its Ritz pairs after every test.

    A slot of the basis in which the search waited holds zeros; its row and column of the matrix are left out.
    """

    def __init__(self, rule: StoppingRule, n: int, room: int, floor: float) -> None:
        self.rule, self.floor, self.products = rule, floor, 0
        self._quadrature: tuple[np.ndarray, np.ndarray] | None = None  # before the first restart
        self._n, self._room = n, room
        self._matrix = np.zeros((room, room))  # tridiagonal, except for the arrow that a restart leaves
        self._start = np.eye(room)[0]  # the start vector on the basis
        self._origin: int | None = 0  # slot of the random vector that spans the Krylov space; None after a restart
        self._used = np.zeros(room, dtype=bool)
        self._size, self._coupling = 0, np.zeros(0)  # slots; coupling of the next basis vector to them
        self._breakdown = 0  # products at the last invariant subspace
        self._before: np.ndarray | None = None  # the wanted values there

    def take(self, alphas: np.ndarray, betas: np.ndarray) -> bool:
        """The coefficients of some steps; False if one is not finite."""
        waits = False
        for alpha, beta in zip(alphas, betas, strict=True):
            m = self._size
            self._size, self._used[m] = m + 1, not waits
            if waits:
                continue
            if not (np.isfinite(alpha) and np.isfinite(beta)):
                return False
            self._matrix[m, :m] = self._matrix[:m, m] = self._coupling
            self._matrix[m, m] = alpha
            self._coupling, self._beta = np.append(np.zeros(m), beta), float(beta)
            self.products += 1
            waits = beta == 0.0
        self._coupling = np.append(self._coupling, np.zeros(self._size - len(self._coupling)))
        return True

    @property
    def broken(self) -> bool:
        """Whether the basis spans an invariant subspace: its values are exact."""
        return self._beta == 0.0

    @property
    def matrix(self) -> np.ndarray:
        """The matrix on the slots in use."""
        used = np.flatnonzero(self._used[: self._size])
        return self._matrix[np.ix_(used, used)]

    def solved(self, values: np.ndarray, vectors: np.ndarray) -> None:
        """Take the eigenpairs of the projected matrix."""
        self.values, self.vectors = values, np.zeros((self._size, len(values)))  # vectors: (slot, value)
        self.vectors[self._used[: self._size]] = vectors
        scale = float(np.abs(values).max()) or 1.0
        if self._beta <= self.floor * scale:
            self._beta = 0.0
            self._coupling = np.zeros(self._size)
        random = None if self._origin is None else self.vectors[self._origin]
        self.pairs = RitzPairs(values, self._beta * self.vectors[-1], random, self._n, self.floor)
        self.positions = wanted(values, self.rule.k, self.rule.which)

    def done(self, steps: int) -> bool:
        """Whether the search ends: the wanted values are known, or its products are spent."""
        if not self.broken:
            enough = self.products - self._breakdown > min(self.rule.k, self._n - 1)
            known = enough and self.rule.done(self.pairs)
        else:
            values, before = self.values[self.positions], self._before
            same = before is not None and len(before) == len(values)
            known = same and bool((np.abs(values - before) <= self.pairs.least).all())
            self._breakdown, self._before = self.products, values
            self._origin = None if self._origin is None else self._size  # the next slot
        return known or self.products >= steps

    @property
    def start_components(self) -> np.ndarray:
        """The start vector on the Ritz vectors."""
        components: np.ndarray = self._start[: self._size] @ self.vectors
        return components

    @property
    def quadrature(self) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and weights of the spectral density of the start, of the basis before the first restart."""
        return self._quadrature or (self.values, self.start_components**2)

    def next_ranks(self, further: int) -> np.ndarray:
        """Positions of the Ritz values of so many ranks after the wanted ones, as far as there are any."""
        more = wanted(self.values, self.rule.k + further, self.rule.which)
        return np.array([at for at in more if at not in self.positions], dtype=int)

    def worth_keeping(self) -> np.ndarray:
        """Positions of the Ritz vectors that a restart keeps: the wanted ones, their neighbours, and both ends."""
        count, last = (len(self.vectors) + len(self.positions)) // 2, len(self.values) - 1
        inner = wanted(self.values, count // 2 if self.rule.which == "both" else count, self.rule.which)
        return np.unique(np.concatenate([inner, [0, last]]))[:last]

    def restart(self, kept: np.ndarray, size: int) -> np.ndarray:
        """Continue with some of the Ritz vectors as the basis, and empty slots up to a size; their coefficients."""
        self._quadrature = self.quadrature
        vectors, count = self.vectors[:, kept], len(kept)
        coefficients = np.zeros((self._size, size))
        coefficients[:, :count] = vectors
        self._start = np.append(self._start[: self._size] @ vectors, np.zeros(self._room - count))
        self._matrix = np.diag(np.append(self.values[kept], np.zeros(self._room - count)))
        self._coupling = np.append(self._beta * vectors[-1], np.zeros(size - count))
        self._used, self._size, self._origin = np.arange(self._room) < count, size, None
        return coefficients


def solve(projections: Iterable[Projection]) -> None:
    """The Ritz pairs of all searches: eigenproblems of equal size in one call."""
    by_size: dict[int, list[tuple[Projection, np.ndarray]]] = {}
    for one in projections:
        matrix = one.matrix
        by_size.setdefault(len(matrix), []).append((one, matrix))
    for group in by_size.values():
        pairs = zip(*np.linalg.eigh(np.stack([matrix for _, matrix in group])), strict=True)
        for (one, _), (values, vectors) in zip(group, pairs, strict=True):
            one.solved(values, vectors)


def restarted(projections: Mapping[int, Projection], count: int) -> np.ndarray:
    """Coefficients of the rows that a thick restart keeps, (count, rows, kept); zero for finished searches."""
    kept = {i: one.worth_keeping() for i, one in projections.items()}
    size = max(map(len, kept.values()))
    rows = {i: one.restart(kept[i], size) for i, one in projections.items()}
    empty = np.zeros_like(next(iter(rows.values())))
    return np.stack([rows.get(i, empty) for i in range(count)])


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
        """Add a row for every search, (M, n), which takes their memory and may round them."""
        self.forget_last()
        if self._count == GROWTH * len(self._blocks):
            count = min(GROWTH, self._room - self._count)
            shape = (self.searches * self._slices, count, self._length)
            self._blocks.append(torch.empty(shape, dtype=self._storage, device=self._device))
        stored, sliced = self._blocks[self._count // GROWTH][:, self._count % GROWTH], self._sliced(rows)
        self._count += 1
        if self.exact:
            stored.copy_(sliced)
            self._last = rows if self._slices > 1 else None
        else:
            stored.copy_(sliced.mul_(self._scale))
            self._last = self._joined(sliced.copy_(stored).div_(self._scale))

    def orthogonal(self, vectors: Tensor) -> Tensor:
        """The part of every vector orthogonal to the rows of its search, by two passes of Gram-Schmidt, (M, n)."""
        rest = self._sliced(vectors, copied=True)
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

    def forget_last(self) -> None:
        """Free a copy of the newest rows."""
        self._last = None

    def clear(self) -> None:
        self._blocks, self._count, self._last = [], 0, None

    def zeros(self) -> Tensor:
        """A vector of zeros for every search, (M, n)."""
        return torch.zeros(self.searches, self._size, dtype=self._dtype, device=self._device)

    def _filled(self) -> list[Tensor]:
        starts = range(0, self._count, GROWTH)
        return [block[:, : self._count - at] for at, block in zip(starts, self._blocks, strict=False)]

    def _sliced(self, vectors: Tensor, *, copied: bool = False) -> Tensor:
        """(M, n) to (M * slices, slice length), padded with zeros, which makes a copy of them."""
        lacking = self._slices * self._length - self._size
        if lacking:
            vectors = F.pad(vectors, (0, lacking))
        elif copied:
            vectors = vectors.clone()
        return vectors.reshape(-1, self._length)

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

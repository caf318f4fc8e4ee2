"""Symmetric operators projected on Krylov bases, and their Ritz pairs: small matrices on the CPU."""

from collections.abc import Iterable, Mapping

import numpy as np

from landscape.curvature.stopping import RitzPairs, StoppingRule, wanted


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

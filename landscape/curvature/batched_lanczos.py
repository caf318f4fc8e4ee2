"""Lanczos searches of several operators side by side, with few transfers from the device.

A step of all searches is one product and a few kernels on one tensor. Their coefficients stay on the device until the
next test of convergence, which transfers those of all searches at once and solves their small eigenproblems on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.batched_basis import BatchedBasis, dots, lengths
from landscape.curvature.krylov_projection import NOT_FINITE, ROUNDING
from landscape.curvature.lanczos import Spectrum, lanczos, next_ranks, summarised, worth_keeping
from landscape.curvature.stopping import Copies, RitzPairs, StoppingRule, Which, wanted
from landscape.curvature.vectors import random_unit

# Steps between tests on a GPU, of one search and of several: a test waits for the device and then keeps it waiting, for
# longer the more searches there are, and every step between two tests may be a product too many. Not measured.
GPU_STRIDES = (2, 4)
FIRST = 2  # products beyond the wanted values before the first test, if not every step is tested

Products = Callable[[Tensor], Tensor]  # rows v_i -> H_i v_i, (M, n) -> (M, n)


def batched_lanczos(
    product: Products,
    starts: Tensor,
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
    copies: Sequence[Copies] | None = None,
    stride: int | None = None,
) -> list[Spectrum | None]:
    """The searches of `lanczos.lanczos_search` for M operators with one product for all; equal to rounding.

    A search that is finished, or whose operator is not finite, goes on with zeros until all are finished. With a
    `stride` above 1 a search may make up to `stride` - 1 products more than needed, whose information it uses, and
    one that meets an invariant subspace waits for the next test; from then on every step is tested.

    `product` takes rows v_i -> H_i v_i, (M, n) -> (M, n), those of finished searches zero; `starts` are random vectors,
    (M, n), whose dtype and device are those of the arithmetic; `stride` None is 1 on a CPU and that of `GPU_STRIDES`
    elsewhere; `copies` are those of each operator's rule. The other arguments are those of `lanczos_search`. The result
    has None where an operator is not finite.
    """
    n, ranks = starts.shape[1], k * (2 if which == "both" else 1)
    room = max(room, ranks + 10)
    steps = min(n, max_steps) if room >= n else max_steps  # n without a restart span everything
    stride = (1 if starts.device.type == "cpu" else GPU_STRIDES[len(starts) > 1]) if stride is None else stride
    stride, first = (1, 1) if room >= n else (stride, ranks + FIRST)
    room = min(room, steps + (first if stride > 1 else 0))  # while one waits, the others go on
    recurrence = _Recurrence(starts, room, storage)
    rules = [StoppingRule(k, which, tol, tol_residual, ends, unseen, one) for one in copies or (None,) * len(starts)]
    searches = {i: _Search(rule, n, room, recurrence.floor) for i, rule in enumerate(rules)}
    found: dict[int, _Result] = {}
    while searches:
        recurrence.extend(product(recurrence.basis.last))
        slots = recurrence.steps
        if stride > 1 and not recurrence.basis.full and slots < steps and (slots < first or (slots - first) % stride):
            recurrence.append()
            continue
        columns = recurrence.transferred()
        searches = {i: search for i, search in searches.items() if search.take(*columns[:, :, i].T)}
        _solve(searches.values())
        for i, search in searches.items():
            if search.done(steps):
                found[i] = _Result(search, recurrence.basis, i, vectors, further)
        searches = {i: search for i, search in searches.items() if i not in found}
        if recurrence.basis.full and searches:
            recurrence.basis.keep(_restarted(searches, len(starts)))
        stride = 1 if any(search.broken for search in searches.values()) else stride
        if searches:
            recurrence.append_after_test(searches)
    if not recurrence.basis.exact:
        _recompute(product, starts, found)
    return [found[i].spectrum(vectors) if i in found else None for i in range(len(starts))]


def device_lanczos(product: Callable[[Tensor], Tensor], start: Tensor, k: int, **options: Any) -> Spectrum:
    """One search: `lanczos.lanczos` on a CPU, elsewhere `batched_lanczos`, which rarely waits for the device.

    Raises:
        FloatingPointError: the operator returned a non-finite vector.
    """
    if start.device.type == "cpu":
        return lanczos(product, start, k, **options)
    (found,) = batched_lanczos(lambda rows: product(rows[0])[None], start[None], k, **options)
    if found is None:
        raise FloatingPointError(NOT_FINITE)
    return found


class _Recurrence:
    """The part of the searches on the device: their bases, and the coefficients since the last transfer."""

    def __init__(self, starts: Tensor, room: int, storage: torch.dtype | None) -> None:
        self.basis = BatchedBasis(starts, room, storage)
        self.floor = ROUNDING.get(starts.dtype, 1e-6)
        self.steps = 0
        self._columns: list[Tensor] = []  # alpha and beta of every search, (2, M) float64
        # Lower bound of the largest |eigenvalue|: a breakdown between two tests is found without a transfer.
        self._scale = torch.zeros(len(starts), dtype=torch.float64, device=starts.device)

    def extend(self, images: Tensor) -> None:
        """Take the images of the last vectors under the operators, (M, n)."""
        alpha = dots(images, self.basis.last)
        self._next = self.basis.orthogonal(images)
        self._beta = lengths(self._next)
        self._scale = torch.fmax(self._scale, torch.fmax(alpha.abs(), self._beta))
        self._columns.append(torch.stack([alpha, self._beta]))
        self.steps += 1

    def append(self) -> None:
        """Add the next Lanczos vectors; zeros after a breakdown, whose beta is then 0."""
        broken = self._beta <= self.floor * self._scale
        self._columns[-1][1].masked_fill_(broken, 0.0)
        self.basis.append(self._normalised(~broken))

    def transferred(self) -> np.ndarray:
        """The coefficients of the steps since the last transfer, (steps, 2, M)."""
        columns = torch.stack(self._columns).cpu().numpy()
        self._columns = []
        return columns

    def append_after_test(self, searches: Mapping[int, _Search]) -> None:
        """As `append` for some searches, zeros for all others; on breakdown a random vector orthogonal to the basis."""
        going = [i in searches and not searches[i].broken for i in range(self.basis.searches)]
        rows = self._normalised(torch.tensor(going, device=self._next.device))
        broken = {i: search.products for i, search in searches.items() if search.broken}
        if broken:
            drawn = torch.zeros_like(rows)
            for i, seed in broken.items():
                drawn[i] = random_unit(drawn.shape[1], seed, device=drawn.device, dtype=drawn.dtype)
            drawn = self.basis.orthogonal(drawn)
            size = lengths(drawn)[:, None]
            rows = rows + drawn / torch.where(size > 0, size, 1.0).to(rows.dtype)
        self.basis.append(rows)

    def _normalised(self, where: Tensor) -> Tensor:
        """The next vectors of some searches and zeros, also in place of NaN, for the others."""
        rows = self._next / self._beta[:, None].to(self._next.dtype)
        return torch.where(where[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


class _Search:
    """The projected operator of one search in numpy, and its Ritz pairs after every test.

    A slot of the basis in which the search waited holds zeros; its row and column of the matrix are left out.
    """

    def __init__(self, rule: StoppingRule, n: int, room: int, floor: float) -> None:
        self.rule, self.floor, self.products = rule, floor, 0
        self.quadrature: tuple[np.ndarray, np.ndarray] | None = None  # before the first restart
        self._n, self._room = n, room
        self._matrix = np.zeros((room, room))
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
    def projected(self) -> np.ndarray:
        """The matrix on the slots in use."""
        used = np.flatnonzero(self._used[: self._size])
        return self._matrix[np.ix_(used, used)]

    def solved(self, values: np.ndarray, vectors: np.ndarray) -> None:
        """Take the eigenpairs of the projected matrix."""
        self.values, self.vectors = values, np.zeros((self._size, len(values)))
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

    def start_components(self) -> np.ndarray:
        """The start vector on the Ritz vectors."""
        components: np.ndarray = self._start[: self._size] @ self.vectors
        return components

    def restart(self, kept: np.ndarray, size: int) -> np.ndarray:
        """Continue with some of the Ritz vectors as the basis, and empty slots up to a size; their coefficients."""
        self.quadrature = self.quadrature or (self.values, self.start_components() ** 2)
        vectors, count = self.vectors[:, kept], len(kept)
        coefficients = np.zeros((self._size, size))
        coefficients[:, :count] = vectors
        self._start = np.append(self._start[: self._size] @ vectors, np.zeros(self._room - count))
        self._matrix = np.diag(np.append(self.values[kept], np.zeros(self._room - count)))
        self._coupling = np.append(self._beta * vectors[-1], np.zeros(size - count))
        self._used, self._size, self._origin = np.arange(self._room) < count, size, None
        return coefficients


def _solve(searches: Iterable[_Search]) -> None:
    """The Ritz pairs of all searches: eigenproblems of equal size in one call."""
    by_size: dict[int, list[tuple[_Search, np.ndarray]]] = {}
    for search in searches:
        matrix = search.projected
        by_size.setdefault(len(matrix), []).append((search, matrix))
    for group in by_size.values():
        pairs = zip(*np.linalg.eigh(np.stack([matrix for _, matrix in group])), strict=True)
        for (search, _), (values, vectors) in zip(group, pairs, strict=True):
            search.solved(values, vectors)


def _restarted(searches: Mapping[int, _Search], count: int) -> np.ndarray:
    """Coefficients of the rows that a thick restart keeps, (count, rows, kept); zero for finished searches."""
    kept = {
        i: worth_keeping(s.values, (len(s.vectors) + len(s.positions)) // 2, s.rule.which) for i, s in searches.items()
    }
    size = max(map(len, kept.values()))
    rows = {i: search.restart(kept[i], size) for i, search in searches.items()}
    empty = np.zeros_like(next(iter(rows.values())))
    return np.stack([rows.get(i, empty) for i in range(count)])


class _Result:
    """What a finished search found, before the basis changes."""

    def __init__(self, search: _Search, basis: BatchedBasis, i: int, vectors: bool, further: int) -> None:
        self.search, at = search, search.positions
        components = search.start_components()
        self.quadrature = search.quadrature or (search.values, components**2)
        self.values, self.products = search.values[at], search.products
        self.residuals, self.errors = search.pairs.residuals[at], search.pairs.errors[at]
        self.rows: Tensor | None = None
        self.further: Tensor | None = None
        if vectors or further or not basis.exact:
            # The sign LAPACK happens to give is fixed, so that equal searches give equal vectors everywhere.
            coefficients = search.vectors * np.where(components < 0, -1.0, 1.0)
            self.rows = basis.combinations(i, coefficients[:, at])
            if (beyond := next_ranks(search.rule, search.values, further)).size:
                self.further = basis.combinations(i, coefficients[:, beyond])

    def spectrum(self, vectors: bool) -> Spectrum:
        found = (self.values, self.residuals, self.errors)
        rows = self.rows if vectors else None
        return summarised(
            self.search.pairs, self.search.rule, found, self.quadrature, self.products, rows, self.further
        )


def _recompute(product: Products, starts: Tensor, found: Mapping[int, _Result]) -> None:
    """Values and residuals of vectors from a basis in half precision, with a product per value for all searches."""
    table: list[Tensor] = []
    most = max((len(result.values) for result in found.values()), default=0)
    for j in range(most):
        batch = torch.zeros_like(starts)
        for i, result in found.items():
            if result.rows is not None and j < len(result.rows):
                result.rows[j].div_(torch.linalg.vector_norm(result.rows[j], dtype=torch.float64).to(starts.dtype))
                batch[i] = result.rows[j]
        images = product(batch)
        values = dots(images, batch)
        table.append(torch.stack([values, lengths(images - values[:, None].to(images.dtype) * batch)]))
    if not table:
        return
    numbers = torch.stack(table).cpu().numpy()  # (value, 2, search)
    for i, result in found.items():
        count = len(result.values)
        result.values, result.products = numbers[:count, 0, i], result.products + count
        pairs, at = result.search.pairs, result.search.positions
        result.residuals = np.maximum(numbers[:count, 1, i], pairs.least)
        result.errors = pairs.recomputed(at, result.values, result.residuals).errors[at]

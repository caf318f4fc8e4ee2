"""Extreme eigenvalues of symmetric operators from their products with vectors (Lanczos 1950), several side by side.

A step of all searches is one product and a few kernels on one tensor. Their coefficients stay on the device until the
next test of convergence, which transfers those of all searches at once and solves their small eigenproblems on the CPU.
Reorthogonalisation is full, by two passes of classical Gram-Schmidt per step ("twice is enough", Giraud et al. 2005). A
full basis is restarted with its best vectors (thick restart, Wu & Simon 2000).
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.krylov_basis import Basis, Projection, dots, lengths, restarted, solve
from landscape.curvature.stopping import Copies, StoppingRule, Which
from landscape.products.vectors import random_unit

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-13}  # residual floor, as a share of the largest |eigenvalue|
# Steps between tests on a GPU, of one search and of several: a test waits for the device and then keeps it waiting, for
# longer the more searches there are, and every step between two tests may be a product too many. Not measured.
GPU_STRIDES = (2, 4)
FIRST = 2  # products beyond the wanted values before the first test, if not every step is tested

Products = Callable[[Tensor], Tensor]  # rows v_i -> H_i v_i, (M, n) -> (M, n)
Searches = Generator[Tensor, Tensor, "list[Spectrum | None]"]  # yields rows v_i, is sent rows H_i v_i


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in the requested order, each with a bound."""

    values: np.ndarray  # (k,)
    # ||H v - lambda v||, (k,): an eigenvalue of H lies within it. Includes rounding. Says nothing about further
    # copies of a multiple eigenvalue: one start vector finds one
    residuals: np.ndarray
    converged: np.ndarray  # within the tolerances, (k,); see `stopping.StoppingRule`
    errors: np.ndarray  # estimates min(r, r^2 / gap) of the errors, (k,); see `stopping.RitzPairs`
    largest: float  # algebraically largest Ritz value, with its residual in `ends`
    smallest: float  # algebraically smallest one
    ends: tuple[float, float]  # residuals of (largest, smallest)
    # Ritz values, (m,): with `weights` a quadrature of the spectral density (before the first restart)
    nodes: np.ndarray
    weights: np.ndarray  # (m,), non-negative, sum 1
    products: int  # operator products spent
    vectors: Tensor | None = None  # (k, n) if requested, each in the half space of the start vector
    further: Tensor | None = None  # Ritz vectors of the next ranks, (further, n) at most, which need not have converged
    missed: int = 0  # how many of the values only the search of `verification.verified` found


def lanczos(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    k: int,
    *,
    which: Which = "LM",
    tol: float | None = 1e-4,
    tol_residual: float | None = None,
    ends: float = 1.0,
    unseen: float = 1.0,
    **how: Any,
) -> Spectrum:
    """The k wanted eigenvalues of one operator v -> H v from a random start (n,).

    What is named are the arguments of `StoppingRule`, the others those of `searches`.

    Raises:
        FloatingPointError: the operator returned a non-finite vector.
    """
    rule = StoppingRule(k, which, tol, tol_residual, ends, unseen)
    (found,) = run(lambda rows: product(rows[0])[None], searches(start[None], rule, **how))
    return finite(found)


def finite(found: Spectrum | None) -> Spectrum:
    """The spectrum of an operator that has to be finite; raises FloatingPointError otherwise."""
    if found is None:
        raise FloatingPointError("a Hessian product is not finite")
    return found


def run(product: Products, running: Searches) -> list[Spectrum | None]:
    """Run searches of M operators with one product for all."""
    rows = next(running)
    try:
        while True:
            images = product(rows)
            del rows  # of what is as long as the weights, nothing is held beyond its use
            rows = running.send(images)
            del images
    except StopIteration as end:
        found: list[Spectrum | None] = end.value
        return found


def searches(
    starts: Tensor,
    rule: StoppingRule,
    *,
    max_steps: int = 200,
    room: int = 200,
    storage: torch.dtype | None = None,
    vectors: bool = False,
    further: int = 0,
    copies: Sequence[Copies] | None = None,
    stride: int | None = None,
) -> Searches:
    """The wanted eigenvalues of each of M operators, None for one that is not finite; a generator.

    A random start is needed: gradient-like starts hide eigenvectors. On breakdown (an invariant subspace) a search
    continues with a random vector orthogonal to the basis, until that changes no wanted value. One that is finished, or
    whose operator is not finite, goes on with zeros until all are finished. With a `stride` above 1 a search may make
    up to `stride` - 1 products more than needed, whose information it uses, and one that meets an invariant subspace
    waits for the next test; from then on every step is tested.

    Args:
        starts: random vectors, (M, n), whose dtype and device are those of the arithmetic.
        rule: what is wanted, and when it is known.
        max_steps: cap on the number of products, at least k; values unconverged then are returned as such.
        room: most vectors kept; at least ten more than wanted values.
        storage: half precision halves the memory of the basis; one more product per value then recomputes it.
        vectors: return eigenvectors too.
        further: also the Ritz vectors of so many ranks after the wanted ones, as far as there are any.
        copies: those of each operator's rule.
        stride: steps between tests of convergence; None is 1 on a CPU and that of `GPU_STRIDES` elsewhere.
    """
    n, ranks = starts.shape[1], rule.k * (2 if rule.which == "both" else 1)
    room = max(room, ranks + 10)
    steps = min(n, max_steps) if room >= n else max_steps  # n without a restart span everything
    stride = (1 if starts.device.type == "cpu" else GPU_STRIDES[len(starts) > 1]) if stride is None else stride
    stride, first = (1, 1) if room >= n else (stride, ranks + FIRST)
    room = min(room, steps + (first if stride > 1 else 0))  # while one waits, the others go on
    basis = (recurrence := _Recurrence(starts, room, storage)).basis
    del starts  # its memory, if nobody else has it
    rules = [replace(rule, copies=one) for one in copies or (None,) * basis.searches]
    going = {i: Projection(one, n, room, recurrence.floor) for i, one in enumerate(rules)}
    found: dict[int, _Result] = {}
    while going:
        recurrence.extend((yield basis.last))
        if stride > 1 and not basis.full and recurrence.between_tests(first, stride, steps):
            recurrence.append()
            continue
        columns = recurrence.transferred()
        going = {i: search for i, search in going.items() if search.take(*columns[:, :, i].T)}
        solve(going.values())
        ended = {i: search for i, search in going.items() if search.done(steps)}
        going = {i: search for i, search in going.items() if i not in ended}
        recurrence.free_unless(going)
        found |= {i: _Result(search, basis, i, vectors, further) for i, search in ended.items()}
        stride = 1 if any(search.broken for search in going.values()) else stride
        recurrence.append_after_test(going)
    if not basis.exact:
        yield from _recomputed(basis, found)
    return [found[i].spectrum(vectors) if i in found else None for i in range(basis.searches)]


class _Recurrence:
    """The part of the searches on the device: their bases, and the coefficients since the last transfer."""

    def __init__(self, starts: Tensor, room: int, storage: torch.dtype | None) -> None:
        self.basis = Basis(starts, room, storage)
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

    def between_tests(self, first: int, stride: int, last: int) -> bool:
        """Whether this step, counted from 1, is neither the first test, nor so many after it, nor the last step."""
        return self.steps < last and (self.steps < first or bool((self.steps - first) % stride))

    def append(self) -> None:
        """Add the next Lanczos vectors; zeros after a breakdown, whose beta is then 0."""
        broken = self._beta <= self.floor * self._scale
        self._columns[-1][1].masked_fill_(broken, 0.0)
        self.basis.append(self._normalised(broken))

    def transferred(self) -> np.ndarray:
        """The coefficients of the steps since the last transfer, (steps, 2, M)."""
        columns = torch.stack(self._columns).cpu().numpy()
        self._columns = []
        return columns

    def append_after_test(self, going: Mapping[int, Projection]) -> None:
        """As `append` for some searches, zeros for all others; on breakdown a random vector orthogonal to the basis.

        A full basis is restarted first. Without searches nothing happens.
        """
        if not going:
            return
        if self.basis.full:
            self.basis.keep(restarted(going, self.basis.searches))
        zero = [i not in going or going[i].broken for i in range(self.basis.searches)]
        rows = self._normalised(torch.tensor(zero, device=self._beta.device) if any(zero) else None)
        broken = {i: search.products for i, search in going.items() if search.broken}
        if broken:
            drawn = torch.zeros_like(rows)
            for i, seed in broken.items():
                drawn[i] = random_unit(drawn.shape[1], seed, device=drawn.device, dtype=drawn.dtype)
            drawn = self.basis.orthogonal(drawn)
            size = lengths(drawn)[:, None]
            rows = rows + drawn / torch.where(size > 0, size, 1.0).to(rows.dtype)
        self.basis.append(rows)

    def free_unless(self, going: Mapping[int, Projection]) -> None:
        """Free the memory of what only further steps need, unless some searches go on."""
        if not going:
            self._next = self._next.new_empty(0)
            self.basis.forget_last()

    def _normalised(self, zero: Tensor | None) -> Tensor:
        """The next vectors, with zeros, also in place of NaN, for some searches; in place."""
        rows, self._next = self._next, self._next.new_empty(0)  # its memory is free during the next product
        rows = rows.div_(self._beta[:, None].to(rows.dtype))
        return rows if zero is None else rows.masked_fill_(zero[:, None], 0.0)


class _Result:
    """What a finished search found, before the basis changes."""

    def __init__(self, search: Projection, basis: Basis, i: int, vectors: bool, further: int) -> None:
        self.search, at = search, search.positions
        self.values, self.products = search.values[at], search.products
        self.residuals, self.errors = search.pairs.residuals[at], search.pairs.errors[at]
        self.rows: Tensor | None = None
        self.further: Tensor | None = None
        if vectors or further or not basis.exact:
            # The sign LAPACK happens to give is fixed, so that equal searches give equal vectors everywhere.
            coefficients = search.vectors * np.where(search.start_components < 0, -1.0, 1.0)
            self.rows = basis.combinations(i, coefficients[:, at])
            if (beyond := search.next_ranks(further)).size:
                self.further = basis.combinations(i, coefficients[:, beyond])

    def spectrum(self, vectors: bool) -> Spectrum:
        """The wanted values with residuals and errors, both ends of all Ritz pairs, and nodes with their weights."""
        pairs, rule = self.search.pairs, self.search.rule
        nodes, weights = self.search.quadrature
        return Spectrum(
            values=self.values, residuals=self.residuals,
            converged=rule.converged(self.values, self.residuals, self.errors), errors=self.errors,
            largest=float(pairs.values[-1]), smallest=float(pairs.values[0]),
            ends=(float(pairs.residuals[-1]), float(pairs.residuals[0])), nodes=nodes, weights=weights,
            products=self.products, vectors=self.rows if vectors else None, further=self.further,
        )  # fmt: skip


def _recomputed(basis: Basis, found: Mapping[int, _Result]) -> Generator[Tensor, Tensor, None]:
    """Values and residuals of vectors from a basis in half precision, which is cleared, with a product per value."""
    basis.clear()
    table: list[Tensor] = []
    for j in range(max((len(result.values) for result in found.values()), default=0)):
        batch = basis.zeros()
        for i, result in found.items():
            if result.rows is not None and j < len(result.rows):
                result.rows[j].div_(lengths(result.rows[j : j + 1]).to(batch.dtype))
                batch[i] = result.rows[j]
        images = yield batch
        values = dots(images, batch)
        table.append(torch.stack([values, lengths(images - batch.mul_(values[:, None].to(images.dtype)))]))
    if not table:
        return
    numbers = torch.stack(table).cpu().numpy()  # (value, 2, search)
    for i, result in found.items():
        count = len(result.values)
        result.values, result.products = numbers[:count, 0, i], result.products + count
        pairs, at = result.search.pairs, result.search.positions
        result.residuals = np.maximum(numbers[:count, 1, i], pairs.least)
        result.errors = pairs.recomputed(at, result.values, result.residuals).errors[at]

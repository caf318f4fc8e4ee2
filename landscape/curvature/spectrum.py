"""Compute the requested eigenvalues of the curvature of one mini-batch, or of several at once, and verify them.

A second Lanczos search finds missed eigenvalues: one start vector cannot see further copies of a multiple value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import Products, Spectrum, finite, run, searches
from landscape.curvature.stopping import Copies, StoppingRule, Which, wanted
from landscape.data.memory import available_on, limit
from landscape.probe import derived_seed
from landscape.products.vectors import length, random_unit

PER_VALUE = ("values", "residuals", "converged", "errors")  # arrays of a spectrum with a row per eigenvalue


def completed(
    product: Products, found: Sequence[Spectrum | None], rule: StoppingRule, seeds: Sequence[int], **memory: Any
) -> list[Spectrum | None]:
    """Spectra of several operators with the eigenvalues that their start vectors missed; None stays None.

    One search for all, in the complements of the vectors found and of the `further` ones, tells where none is likely,
    for about four products; see `verified` for the others. Their seeds must not be those of the first searches.
    """
    complete: list[Spectrum | None] = list(found)
    suspects: set[int] = set()
    for end in ("LA", "SA") if rule.which == "both" else (rule.which,):
        told = _suspected(product, found, rule.which, end, seeds, **memory)
        suspects |= {i for i, one in enumerate(told) if one.suspected}
        complete = [
            one and replace(one, products=one.products + spent.products)
            for one, spent in zip(complete, told, strict=True)
        ]
    for i in suspects:
        if (one := complete[i]) is not None:
            complete[i] = verified(_row(product, i, len(found)), one, rule, seeds[i], **memory)
    return complete


def verified(
    product: Callable[[Tensor], Tensor], found: Spectrum, rule: StoppingRule, seed: int = 0, **memory: Any
) -> Spectrum:
    """Search the orthogonal complement of the found eigenvectors, until none further out than the last one is likely.

    Lanczos from a fresh random start on P H P, P the projection off the vectors V found so far, for its one outermost
    value. It was missed if it lies further out than the last wanted value, by more than the errors of all; it then
    joins V and the search goes on, so that a value of any multiplicity is found, one search per copy. Its residual is
    that on H, from one more product. Vectors that are off by r / gap let P H P be off by r^2 / gap, as the values are.

    With `both` one end is searched after the other. Order and tolerances of the `rule` are those of the first search,
    `memory` its `room`, `storage` and `max_steps`, which caps the products of one search. The missed values get their
    places in the spectrum; `missed` counts them, and `products` includes the search.

    Raises:
        ValueError: the spectrum has no vectors.
        FloatingPointError: the operator returned a non-finite vector.
    """
    if found.vectors is None:
        raise ValueError("verifying needs the eigenvectors; call lanczos with vectors=True")
    if rule.which != "both":
        return _searched(product, found, None, rule, seed, **memory)
    upper, lower = (_end(found, end, rule.which) for end in ("LA", "SA"))
    upper = _searched(product, upper, lower.vectors, replace(rule, which="LA"), seed, **memory)
    lower = _searched(product, lower, upper.vectors, replace(rule, which="SA"), seed + 1, **memory)
    products, missed = upper.products + lower.products - found.products, upper.missed + lower.missed
    return replace(found, **_joined(upper, lower), products=products, missed=missed)


def _searched(
    product: Callable[[Tensor], Tensor], found: Spectrum, excluded: Tensor | None, rule: StoppingRule, seed: int,
    **memory: Any,
) -> Spectrum:  # fmt: skip
    k, known, missed, which = len(found.values), found, 0, rule.which
    while True:
        off = _orthonormal(known.vectors, excluded)
        best = _part(known, wanted(known.values, k, which))
        copies = Copies.of(best.values, best.errors, which)
        only = Complement(lambda rows: product(rows[0])[None], off[None], [_aside(known, which)])
        if len(off) == off.shape[1] or not copies.values:
            break
        (told,) = _told(only, [copies], which, [seed + 1000 * missed], **memory)
        known = replace(known, products=known.products + told.products)
        if not told.suspected:
            break
        start = only.projected(_starts(off.shape[1], [seed + 1000 * missed + 1], off))
        asked = StoppingRule(1, which, rule.tol, rule.tol_residual)
        extra = finite(run(only, searches(start, asked, vectors=True, **memory))[0])
        vector = _vectors(extra)[0]
        residual = length(product(vector) - float(extra.values[0]) * vector).item()
        known = replace(known, products=known.products + extra.products + 1)
        if not copies.further(extra.values[0], which):
            break
        missed += 1
        residuals = np.maximum(extra.residuals, residual)
        errors = np.minimum(residuals, extra.errors)
        sure = rule.converged(extra.values, residuals, errors)
        known = replace(known, **_joined(known, replace(extra, residuals=residuals, errors=errors, converged=sure)))
    return replace(_part(known, wanted(known.values, k, which)), missed=missed)


@dataclass(frozen=True)
class Told:
    """Whether a complement holds a value further out than the last wanted one, and the products that told."""

    suspected: bool = False
    products: int = 0


def _suspected(
    product: Products, found: Sequence[Spectrum | None], which: Which, end: Which, seeds: Sequence[int], **memory: Any
) -> list[Told]:
    """Ask for values at one end in the complements of all vectors of each spectrum."""
    parts = [None if one is None else _end(one, end, which) for one in found]
    ask = {i: Copies.of(one.values, one.errors, end) for i, one in enumerate(parts) if one is not None}
    known = {i: _orthonormal(one.vectors, one.further) for i, one in enumerate(found) if one is not None}
    ask = {i: one for i, one in ask.items() if one.values and len(known[i]) < known[i].shape[1]}
    if not ask:
        return [Told()] * len(found)
    off = known[0][None]
    if len(found) > 1:
        like = next(iter(known.values()))
        off = like.new_zeros(len(found), max(map(len, known.values())), like.shape[1])
        for i, rows in known.items():
            off[i, : len(rows)] = rows
    only = Complement(product, off, [0.0 if one is None else _aside(one, end) for one in parts])
    told = _told(only, [ask.get(i, Copies((), 0.0)) for i in range(len(found))], end, seeds, **memory)
    return [one if i in ask else Told() for i, one in enumerate(told)]


def _told(only: Complement, copies: Sequence[Copies], which: Which, seeds: Sequence[int], **memory: Any) -> list[Told]:
    starts = only.projected(_starts(only.off.shape[2], seeds, only.off))
    found = run(only, searches(starts, StoppingRule(1, which), copies=copies, **memory))
    return [
        Told() if one is None else Told(own.further(one.values[0], which), one.products)
        for one, own in zip(found, copies, strict=True)
    ]


@dataclass(frozen=True)
class Complement:
    """Several operators in the complements of orthonormal vectors, P H P + a (1 - P), a far from what is searched."""

    product: Products
    off: Tensor  # (operators, vectors, n)
    aside: Sequence[float]

    def projected(self, rows: Tensor) -> Tensor:
        """The part of each vector in its complement, (operators, n)."""
        return rows - torch.einsum("mrn,mr->mn", self.off, torch.einsum("mrn,mn->mr", self.off, rows))

    def __call__(self, rows: Tensor) -> Tensor:
        inside = self.projected(rows)
        return self.projected(self.product(inside)) + rows.new_tensor(self.aside)[:, None] * (rows - inside)


def _aside(found: Spectrum, which: Which) -> float:
    """A value that is not further out than others at one end."""
    return {"LA": found.smallest, "SA": found.largest}.get(which, 0.0)


def _row(product: Products, i: int, count: int) -> Callable[[Tensor], Tensor]:
    def row(vector: Tensor) -> Tensor:
        rows = vector.new_zeros(count, len(vector))
        rows[i] = vector
        return product(rows)[i]

    return row


def _end(found: Spectrum, end: Which, which: Which) -> Spectrum:
    """The part of a spectrum that is wanted at one end."""
    if which != "both":
        return found
    k = len(found.values) // 2
    return _part(found, np.arange(k) + (k if end == "SA" else 0))


def _vectors(spectrum: Spectrum) -> Tensor:
    assert spectrum.vectors is not None
    return spectrum.vectors


def _joined(*parts: Spectrum) -> dict[str, Any]:
    rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_VALUE}
    return {**rows, "vectors": torch.cat([_vectors(part) for part in parts])}


def _part(found: Spectrum, positions: np.ndarray) -> Spectrum:
    rows: dict[str, Any] = {name: getattr(found, name)[positions] for name in PER_VALUE}
    return replace(found, vectors=_vectors(found)[positions.tolist()], **rows)


def _orthonormal(*parts: Tensor | None) -> Tensor:
    """A basis of the same span: joined vectors are orthogonal to single precision only; `both` may hold one twice.

    By Gram-Schmidt, twice and in place: there may be memory for one copy of the vectors, not for more.
    """
    rows, count = torch.cat([part for part in parts if part is not None]), 0
    for row in rows:
        for _ in range(2):
            row = row - rows[:count].T @ (rows[:count] @ row)
        if (size := length(row)) > 1e-3:
            rows[count] = row / size.to(row.dtype)
            count += 1
    return rows[:count]


BASIS_BYTES = 2**31  # memory for the vectors of a search
VECTOR_RESIDUAL = 1e-3  # relative residual of stored or verified eigenvectors: their error is r / gap, not r^2 / gap
MIN_ROWS = 64  # if fewer fit in single precision, they are stored in half precision


@dataclass(frozen=True)
class Request:
    """Which eigenvalues to compute, and how; see `lanczos.lanczos`."""

    top: int
    which: Which
    tol: float | None  # estimated relative error; see `stopping.StoppingRule`
    tol_residual: float | None
    ends: float
    max_products: int
    vectors: bool
    verify: bool  # search for copies of equal values and others that were missed, afterwards

    @property
    def searched(self) -> bool:
        """Whether values may be missing: a copy of the only wanted one changes nothing."""
        return self.verify and self.top > 1

    @property
    def ranks(self) -> int:
        return self.top * (2 if self.which == "both" else 1)

    @property
    def criterion(self) -> str:
        """When a value counts as converged, in words."""
        parts = {"error": self.tol, "residual": self.tol_residual}
        return " and ".join(f"{name} <= {tol:g} |eigenvalue|" for name, tol in parts.items() if tol is not None)

    def stored(self, size: int, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes of the vectors that a search keeps at most, each of so many entries."""
        rows, storage = room(size, dtype, device)
        return min(max(rows, self.ranks + 10), self.max_products) * size * (storage or dtype).itemsize

    def capped(self, size: int) -> Request:
        """The request with `top` limited to the number of rows."""
        return replace(self, top=min(self.top, size))


def spectrum(product: Callable[[Tensor], Tensor], request: Request, size: int, seed: int, like: Tensor) -> Spectrum:
    """The eigenvalues of one matrix with `size` rows, from its products v -> H v; the other arguments as of `spectra`.

    Raises:
        FloatingPointError: the matrix is not finite.
    """
    (found,) = spectra(lambda rows: product(rows[0])[None], request, size, [seed], like)
    return finite(found)


def spectra(
    product: Products, request: Request, size: int, seeds: Sequence[int], like: Tensor
) -> list[Spectrum | None]:
    """The eigenvalues of M matrices with one product for all; None where one is not finite.

    Args:
        product: rows v_i -> H_i v_i, (M, size) to (M, size).
        request: what is wanted.
        size: rows of each matrix.
        seeds: those of the random start vectors, and of the searches for missed values, M.
        like: a tensor of the dtype and on the device of the vectors.
    """
    rows, storage = room(size, like.dtype, like.device)
    rule = StoppingRule(request.top, request.which, request.tol, request.tol_residual, request.ends)
    how: dict[str, Any] = {"max_steps": request.max_products, "room": max(rows // len(seeds), 1), "storage": storage}
    further = request.ranks if request.searched and storage is None else 0  # where memory is short, fewer vectors
    wanted = request.vectors or request.searched
    found = run(product, searches(_starts(size, seeds, like), rule, vectors=wanted, further=further, **how))
    if not request.searched:
        return found
    complete = completed(product, found, rule, [derived_seed(seed, "verify") for seed in seeds], **how)
    return [one and replace(one, further=None, vectors=one.vectors if request.vectors else None) for one in complete]


def _starts(size: int, seeds: Sequence[int], like: Tensor) -> Tensor:
    """Random unit vectors, (seeds, size)."""
    drawn = [random_unit(size, seed, device=like.device, dtype=like.dtype) for seed in seeds]
    return drawn[0][None] if len(drawn) == 1 else torch.stack(drawn)


def memory(start: Tensor) -> tuple[int, torch.dtype | None]:
    """How many vectors a search may keep and in what precision, so that large models fit too."""
    return room(start.numel(), start.dtype, start.device)


def room(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, torch.dtype | None]:
    """As `memory`, for vectors of so many entries."""
    rows = _basis_bytes(device) // (size * dtype.itemsize)
    if rows >= MIN_ROWS or dtype != torch.float32:
        return rows, None
    return 2 * rows, torch.float16


def _basis_bytes(device: torch.device) -> int:
    """Memory for the vectors of searches that run at once: on a GPU a quarter of what is free, if that is more.

    Of a limit that the user gave, a quarter at most.
    """
    if device.type != "cuda":
        return min(BASIS_BYTES, (limit() or 4 * BASIS_BYTES) // 4)
    most = max(BASIS_BYTES, available_on(device) // 4)
    return most if (given := limit()) is None else min(most, given // 4)

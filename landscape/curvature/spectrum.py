"""The eigenvalues asked for, of the curvature of one mini-batch or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import Search, Spectrum, Which, lanczos, searching, side_by_side
from landscape.curvature.vectors import random_unit
from landscape.curvature.verification import verified
from landscape.probe import derived_seed

BASIS = 2**31  # bytes for the vectors of a search
ROWS = 64  # below as many in single precision they are stored in half precision


@dataclass(frozen=True)
class Request:
    """What is asked of every matrix; see `lanczos`.

    Args:
        verify: search beside what was found for values that were missed.
    """

    top: int
    which: Which
    tol: float
    ends: float
    most: int
    vectors: bool
    verify: bool

    @property
    def ranks(self) -> int:
        """Eigenvalues per matrix."""
        return self.top * (2 if self.which == "both" else 1)

    def capped(self, size: int) -> Request:
        """The request where a matrix has fewer rows than eigenvalues are asked for."""
        return replace(self, top=min(self.top, size))


@dataclass(frozen=True)
class Found:
    """A spectrum, and how many of its values only the search beside the others found."""

    spectrum: Spectrum
    missed: int = 0


def spectrum(product: Callable[[Tensor], Tensor], request: Request, start: Tensor, seed: int) -> Found:
    """The eigenvalues of one matrix.

    Args:
        product: v -> H v.
        request: what is asked.
        start: random vector, (n,).
        seed: of the search beside what was found.

    Raises:
        FloatingPointError: the matrix is not finite.
    """
    room, storage = memory(start)
    found = lanczos(
        product, start, request.top, which=request.which, tol=request.tol, ends=request.ends, max_steps=request.most,
        room=room, storage=storage, vectors=request.vectors or request.verify,
    )  # fmt: skip
    return _verified(product, found, request, seed) if request.verify else Found(found)


def spectra(
    joint: Callable[[Tensor], Tensor], request: Request, starts: Sequence[Tensor], seeds: Sequence[int]
) -> list[Found | None]:
    """The eigenvalues of several matrices with one product for all, (M, n) -> (M, n); None where one is not finite."""
    room, storage = memory(starts[0])

    def search(start: Tensor) -> Search:
        return searching(
            start, request.top, which=request.which, tol=request.tol, ends=request.ends, max_steps=request.most,
            room=max(room // len(starts), 1), storage=storage, vectors=request.vectors or request.verify,
        )  # fmt: skip

    found = side_by_side(joint, [search(start) for start in starts])
    if not request.verify:
        return [None if one is None else Found(one) for one in found]

    def alone(i: int) -> Callable[[Tensor], Tensor]:
        def product(vector: Tensor) -> Tensor:
            rows = vector.new_zeros(len(starts), len(vector))
            rows[i] = vector
            return joint(rows)[i]

        return product

    return [
        None if one is None else _verified(alone(i), one, request, seed)
        for i, (one, seed) in enumerate(zip(found, seeds, strict=True))
    ]


def memory(start: Tensor) -> tuple[int, torch.dtype | None]:
    """How many vectors a search may keep and in what precision, so that large models fit too."""
    rows = BASIS // (start.numel() * start.element_size())
    if rows >= ROWS or start.dtype != torch.float32:
        return rows, None
    return 2 * rows, torch.float16


def start_of(size: int, seed: int, like: Tensor) -> Tensor:
    """The random vector that belongs to a seed."""
    return random_unit(size, seed, device=like.device, dtype=like.dtype)


def values_of(found: Found | None, request: Request, *, nodes: int, size: int) -> dict[str, Any]:
    """What is stored of one matrix, each row as long as the request and with NaN behind; NaN where it is not finite.

    Args:
        found: None where a product was not finite.
        request: what was asked.
        nodes: room for the nodes of a search.
        size: parameters.
    """
    ranks = request.ranks
    if found is None:
        values: dict[str, Any] = dict.fromkeys(("largest", "smallest", "largest_residual", "smallest_residual"), np.nan)
        values |= {name: np.full(ranks, np.nan) for name in ("eigenvalue", "residual", "error")}
        values |= {"nodes": np.full(nodes, np.nan), "weights": np.full(nodes, np.nan)}
        values |= {"converged": np.zeros(ranks), "matvecs": 1}
    else:
        one = found.spectrum
        values = {
            "eigenvalue": padded(one.values, ranks),
            "residual": padded(one.residuals, ranks),
            "error": padded(one.errors, ranks),
            "converged": padded(one.converged, ranks),
            "largest": one.largest,
            "smallest": one.smallest,
            "largest_residual": one.ends[0],
            "smallest_residual": one.ends[1],
            "matvecs": one.products,
            "nodes": padded(one.nodes, nodes),
            "weights": padded(one.weights, nodes),
        }
    if request.verify:
        values["missed"] = np.nan if found is None else found.missed
    if request.vectors:
        vectors = None if found is None else found.spectrum.vectors
        empty = np.full((ranks, size), np.nan)
        values["eigenvector"] = empty if vectors is None else vectors.double().cpu().numpy()
    return values


def padded(values: np.ndarray, count: int) -> np.ndarray:
    """Values with NaN behind them, (count,)."""
    row = np.full(count, np.nan)
    row[: len(values)] = values[:count]
    return row


def _verified(product: Callable[[Tensor], Tensor], found: Spectrum, request: Request, seed: int) -> Found:
    other = derived_seed(seed, "verify")
    checked = verified(product, found, which=request.which, tol=request.tol, max_steps=request.most, seed=other)
    return Found(checked.spectrum, checked.missed)


RESAMPLES = 1000


def summaries(values: np.ndarray) -> dict[str, float]:
    """NEP and APE of all eigenvalues, each with a 95 % bootstrap interval over mini-batches.

    Args:
        values: eigenvalues, (batch, rank), NaN where a matrix has fewer.
    """
    if len(values) == 0:
        return {}
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    found: dict[str, float] = {}
    for name, statistic in (("nep", negative_share), ("ape", positive_mean)):
        found[name] = statistic(values)
        spread = np.array([statistic(values[rows]) for rows in draws])
        if len(values) > 1 and np.isfinite(spread).any():
            found[f"{name}_low"], found[f"{name}_high"] = np.nanquantile(spread, [0.025, 0.975])
    return found


def negative_share(values: np.ndarray) -> float:
    """NEP: share of negative values, a measure of non-convexity."""
    return float((values < 0).sum() / np.isfinite(values).sum())


def positive_mean(values: np.ndarray) -> float:
    """APE: mean of the positive values, a measure of sharpness; NaN where there are none."""
    positive = values[values > 0]
    return float(positive.mean()) if positive.size else float("nan")

"""Compute the requested eigenvalues of the curvature of one mini-batch, or of several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from landscape.curvature.lanczos import Spectrum, batched_lanczos, finite
from landscape.curvature.stopping import Which
from landscape.curvature.verification import completed
from landscape.data.memory import available_on, limit
from landscape.probe import derived_seed

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
        """Eigenvalues per matrix."""
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


def spectrum(product: Callable[[Tensor], Tensor], request: Request, start: Tensor, seed: int) -> Spectrum:
    """The eigenvalues of one matrix, from its products v -> H v; the seed is that of the search for missed values.

    Raises:
        FloatingPointError: the matrix is not finite.
    """
    (found,) = spectra(lambda rows: product(rows[0])[None], request, [start], [seed])
    return finite(found)


def spectra(
    product: Callable[[Tensor], Tensor], request: Request, starts: Sequence[Tensor], seeds: Sequence[int]
) -> list[Spectrum | None]:
    """The eigenvalues of several matrices with one product for all, (M, n) -> (M, n); None where one is not finite."""
    room, storage = memory(starts[0])
    rows = starts[0][None] if len(starts) == 1 else torch.stack(list(starts))
    how: dict[str, Any] = {"which": request.which, "tol": request.tol, "tol_residual": request.tol_residual}
    how |= {"max_steps": request.max_products, "room": max(room // len(starts), 1), "storage": storage}
    further = request.ranks if request.searched and storage is None else 0  # where memory is short, fewer vectors
    wanted = request.vectors or request.searched
    found = batched_lanczos(product, rows, request.top, ends=request.ends, vectors=wanted, further=further, **how)
    if not request.searched:
        return found
    complete = completed(product, found, seeds=[derived_seed(seed, "verify") for seed in seeds], **how)
    return [one and replace(one, further=None, vectors=one.vectors if request.vectors else None) for one in complete]


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

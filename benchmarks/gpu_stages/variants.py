"""Variants of this package's computations that no option selects, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from landscape.curvature import hvp_backends
from landscape.subject.graph_replay import GraphReplay


@contextmanager
def side_by_side(count: int) -> Iterator[None]:
    """Make batched products of so many mini-batches; of the package's own number for 0."""
    with patch.object(hvp_backends, "BATCHED", count) if count else nullcontext():
        yield


@contextmanager
def cuda_graphs(allowed: bool) -> Iterator[None]:
    """Launch every kernel by itself unless allowed; without a GPU that is always so."""
    with nullcontext() if allowed else patch.object(GraphReplay, "_records", lambda self, given: False):
        yield

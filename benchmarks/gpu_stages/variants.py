"""Variants of this package's computations that no option selects, for comparison."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from landscape.products import hvp_backends
from landscape.subject.graph_replay import GraphReplay


@contextmanager
def side_by_side(count: int) -> Iterator[None]:
    """Make products of so many mini-batches at once; 0: of one by one."""
    with patch.object(hvp_backends, "mini_batches_per_product", lambda *_: count):
        yield


@contextmanager
def cuda_graphs(allowed: bool) -> Iterator[None]:
    """Launch every kernel by itself unless allowed; without a GPU that is always so."""
    with nullcontext() if allowed else patch.object(GraphReplay, "_records", lambda self, given: False):
        yield

"""Deterministic algorithms alone, also where they are slower."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LACKS = " does not have a deterministic implementation"  # how torch begins to say that an operation has none


@contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """While the block runs, operations give equal bits for equal inputs on this machine, or refuse to run.

    On a CPU with a fixed number of threads they do so anyway. What cuBLAS needs for it has to be set before the first
    CUDA call of the process.

    Raises:
        RuntimeError: an operation has no such algorithm; names it.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        operation, lacks, _ = str(error).partition(LACKS)
        if not lacks:
            raise
        raise RuntimeError(
            f"{operation} has no deterministic algorithm on this device; go without --deterministic, or on a CPU"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]

"""Restrict torch to deterministic algorithms, even where they are slower."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LACKS = " does not have a deterministic implementation"  # follows the name of an operation in torch's error


@contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Within the block, operations give equal bits for equal inputs on this machine, or raise.

    On a CPU with a fixed number of threads they do so anyway. The setting that cuBLAS needs must be made before the
    first CUDA call of the process.

    Raises:
        RuntimeError: the named operation has no deterministic algorithm.
    """
    if not enabled:
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
            f"{operation} has no deterministic algorithm on this device; drop --deterministic, or train on a CPU"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]

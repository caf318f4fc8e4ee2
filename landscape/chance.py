"""The global random generators: noticed when foreign code draws from them, and fixed while it runs.

Numpy's is the legacy one, which is what foreign code draws from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states() -> list[Any]:
    """States of the generators that foreign code draws from: torch's (of every device in use), numpy's, Python's."""
    accelerators = [torch.cuda.get_rng_state(i) for i in _accelerators()]
    return [*(s.numpy().tobytes() for s in (torch.get_rng_state(), *accelerators)), _legacy(), random.getstate()]


@contextmanager
def fixed(seed: int) -> Iterator[None]:
    """Seed all of them, and put them back afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=_accelerators()):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpys)  # noqa: NPY002
            random.setstate(pythons)


def _legacy() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return kind, np.asarray(keys).tobytes(), *rest


def _accelerators() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

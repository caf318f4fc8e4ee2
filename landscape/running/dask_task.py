"""The task of a worker of dask, in a module that imports no torch: the scheduler imports it too."""

import pickle
from typing import Any


def measure(work: bytes, units: bytes) -> list[tuple[float, Any]]:
    """Seconds and values of pickled units of some pickled work, which the scheduler passes on as they are."""
    from landscape.running.work import measure_chunk

    return measure_chunk(pickle.loads(work), pickle.loads(units))

"""The task of a worker of dask, in a module that imports no torch: the scheduler imports it too."""

import pickle
from typing import Any


def measure(work: bytes, units: bytes, slots: dict[str, int]) -> list[tuple[float, Any]]:
    """Seconds and values of pickled units of some pickled work, which the scheduler passes on as they are.

    `slots`: the first of a worker among the threads of its host, by its address.
    """
    from distributed import get_worker

    from landscape.running.work import measure_chunk

    return measure_chunk(pickle.loads(work), pickle.loads(units), slots.get(get_worker().address, 0))

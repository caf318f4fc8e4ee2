"""Freed memory stays with the process, for the next tensors.

By default glibc returns large blocks to the system as soon as they are freed, and gets the same pages again, emptied,
for the next tensor of the same size: up to a half of a forward pass of a convolutional network on a CPU goes there.
"""

from __future__ import annotations

import ctypes
import os
import sys

# The variable, the number of `mallopt` for it, the value: blocks below go on the heap, whose free end is kept so far.
KEPT = (("MALLOC_MMAP_THRESHOLD_", -3, 2**30), ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1))


def keep_freed() -> None:
    """Let the C library keep freed memory, in this process and those it starts; on Linux with glibc alone.

    Whoever has set one of its variables has chosen already.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(name in os.environ for name, _, _ in KEPT):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number, value in KEPT:
        os.environ[name] = str(value)  # read by the C library of a process when it starts
        if mallopt is not None:
            mallopt(number, value)

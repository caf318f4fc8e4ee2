"""Run what HDF5 may crash on, or may not end, in child processes of limited memory and processor time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ITEM_SHARE = 0.05  # of the processor time, for one item; of a file of 80 MB none was seen to take a tenth of it
ROOM = 2**29  # bytes of memory
PAUSE = 5  # seconds between two words about progress


class Children:
    """Child processes of so much `room` in memory; `left` is what is left to them of `seconds` of processor time."""

    def __init__(self, seconds: float, progress: Callable[[str], None], room: int = ROOM) -> None:
        self.seconds, self.left, self._room = seconds, seconds, room
        self._progress, self._said = progress, time.monotonic()

    def one(self, call: Callable[[], Any]) -> Any:
        """What a function of plain data returns; None if it fails."""
        return next((found for _, found in self.each(lambda _: iter([call()]), [None])), None)

    def each(self, work: Callable[[Sequence[T]], Iterator[Any]], items: Sequence[T]) -> Iterator[tuple[T, Any]]:
        """Every item with what `work` gives for it, in plain data; None where the process died of it."""
        at = 0
        while at < len(items) and self.left > 0:
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.close(read)
                _work(work, items[at:], write, self.left, self.seconds * ITEM_SHARE, self._room)
            os.close(write)
            try:
                with os.fdopen(read) as stream:
                    for line in stream:
                        if line.endswith("\n"):
                            at += 1
                            yield items[at - 1], json.loads(line)
                            if time.monotonic() > self._said + PAUSE:
                                self._said = time.monotonic()
                                self._progress(f"{at:,} of {len(items):,} places examined")
            finally:
                used = os.wait4(child, 0)[2]
                self.left -= used.ru_utime + used.ru_stime
            if at < len(items):
                yield items[at], None
                at += 1


def _work(
    work: Callable[[Sequence[T]], Iterator[Any]],
    items: Sequence[T],
    write: int,
    seconds: float,
    item_seconds: float,
    room: int,
) -> None:
    """Be the child process: one line for each item; ends it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # only Linux says how much there is
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.RLIM_INFINITY))
        limit = math.ceil(time.process_time() + max(seconds, 1))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside HDF5
        with os.fdopen(write, "w", buffering=1) as stream:
            answers = work(items)
            for _ in items:
                signal.setitimer(signal.ITIMER_PROF, item_seconds)
                stream.write(json.dumps(next(answers)) + "\n")
    finally:
        os._exit(0)

"""Processes of this machine that carry out calls which do not need each other, several at once."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeAlias

Each: TypeAlias = Callable[..., Iterable[Any]]


@contextmanager
def pool(workers: int) -> Iterator[Each]:
    """The `map` of so many processes, each with a share of the threads; with one worker `map` itself.

    They end with this process, also if it is killed. What they call must keep what is finished, which is all that is
    left of calls that run at an error.

    Raises:
        RuntimeError: one of them died.
    """
    if workers == 1:
        yield map
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (workers,))
    try:
        yield executor.map
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} workers died (out of memory?); what is finished is kept, run again with fewer"
        ) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
            process.join()


def _begin(workers: int) -> None:
    """Leave Ctrl-C to the parent, end with it, and take a share of the threads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from landscape.subject.threads import thread_limit

    torch.set_num_threads(max(1, thread_limit() // workers))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)

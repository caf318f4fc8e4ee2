"""Everything the command line sets for the whole process: memory allocation, OpenMP, threads and what measures.

Nothing here happens when the library is imported. What the user has set in the environment is left alone.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from landscape.options import OptionError, at_least

if TYPE_CHECKING:
    from landscape.running.executor import Executor
    from landscape.subject.process_group import ProcessGroup

AGAIN_SECONDS = 0.01  # until a signal that was lost comes again
INTERRUPTED, TERMINATED = 130, 143  # 128 + the number of the signal, the convention of shells
# Environment variable, number for `mallopt`, value: blocks up to the first size come from the heap, and its free end is
# kept up to the second.
MALLOC = (("MALLOC_MMAP_THRESHOLD_", -3, 2**30), ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1))
LARGE = 2**26  # bytes of the parameters from which vectors of their size go back to the system, see `free_large_blocks`
# How threads wait for each other, by the names that libgomp and libomp read when torch is imported.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def set_up_process() -> None:
    """Prepare this process and those it starts; to be called before torch is imported."""
    keep_freed_memory()
    # Threads that wait for another one spin by default, up to 15 ms at the end of every parallel piece of an operation,
    # on the very CPU that the other one may be waiting for. With two threads on two cores beside two busy processes a
    # Hessian product of a small network, 20 ms with one thread, took 6 s with that default, 0.3 s with a short spin and
    # 0.15 s without. On a quiet machine two threads without a spin are at most a fifth slower.
    if not any(name in os.environ for name in WAITING):
        os.environ[WAITING[0]] = "passive"


def keep_freed_memory() -> None:
    """Let glibc on Linux keep freed memory for the next tensors.

    By default it returns large blocks to the system as soon as they are freed, and gets the same pages, zeroed, for the
    next tensor of that size: up to half the time of a forward pass of a convolutional network on a CPU.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(name in os.environ for name, _, _ in MALLOC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, number, value in MALLOC:
        os.environ[name] = str(value)  # read by the C library of a process when it starts
        if mallopt is not None:
            mallopt(number, value)


def free_large_blocks(parameters: int) -> None:
    """Let glibc return the vectors of a network with so many bytes of parameters to the system when they are freed.

    Kept ones leave gaps that others do not fit into, which for a network of 124 million parameters is gigabytes; the
    time of new pages is nothing beside that of its products.
    """
    name, number, value = MALLOC[0]
    if parameters >= LARGE and sys.platform == "linux" and os.environ.get(name) == str(value):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(number, LARGE)


@contextmanager
def importing() -> Iterator[None]:
    """Import torch, or other large packages, without garbage collection, which would visit all they define again.

    What is imported stays, so that later collections need not visit it either: 0.2 s less for the imports, and a tenth
    less for tracing a network. Where torch is imported already, by a program that uses this package, nothing changes.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


class Terminated(BaseException):
    """SIGTERM, handled like Ctrl-C: finished units are merged into the results file."""


# Signals that are to end this command: what is imported or measured may make an error of its own of their exception.
RECEIVED: list[int] = []


def end_at_once_by_ctrl_c() -> None:
    """End at Ctrl-C without Python's traceback while the command itself is imported, which hears it from then on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_now)


def end_by_signals() -> None:
    """End the command at Ctrl-C and SIGTERM by an exception, so that it merges what is finished; at a second one now.

    A shell that starts a command in the background lets it ignore Ctrl-C, which stays so.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    atexit.register(_ignore_signals)  # before others, so that it is the last to be called
    sys.unraisablehook = _end_after_all


def _end(number: int, frame: FrameType | None) -> None:
    RECEIVED.append(number)
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is _end:
            signal.signal(each, _end_now)
    end_if_received()


def end_if_received() -> None:
    """Raise what a signal raises, also after its first exception was caught by what it interrupted."""
    if RECEIVED:
        raise KeyboardInterrupt if RECEIVED[0] == signal.SIGINT else Terminated("terminated")


def _ignore_signals() -> None:
    """Keep the exit code of a command that has ended: Python, as it ends, takes a signal for the end of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (_end, _end_now, _leave):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def last_line() -> Iterator[None]:
    """Say in the block, undisturbed, that a signal ended the command; a further one ends it without another line."""
    ours = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) in (_end, _end_now)]
    for each in ours:
        signal.signal(each, signal.SIG_IGN)
    yield
    for each in ours:
        signal.signal(each, _leave)


def _end_after_all(ignored: sys.UnraisableHookArgs) -> None:
    """Send a signal again whose exception came in a destructor or a callback of a weak reference, where it is lost."""
    number = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(ignored.exc_type)
    if number is None:
        sys.__unraisablehook__(ignored)
        return
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is _end_now:
            signal.signal(each, _end)
    RECEIVED.clear()

    def again() -> None:
        time.sleep(AGAIN_SECONDS)
        os.kill(os.getpid(), number)

    _thread.start_new_thread(again, ())  # one of `threading` takes locks, which what was interrupted may hold


def _end_now(number: int, frame: FrameType | None) -> None:
    """End without merging: the journal keeps what is finished, as after a kill, and the next run merges it."""
    shown = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides the cursor
    with suppress(OSError):
        os.write(2, shown + b"landscape: ended at once; everything finished is kept, run the same command to resume\n")
    _leave(number, frame)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED if number == signal.SIGINT else TERMINATED)


def under_torchrun() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def sharing_processes() -> Iterator[ProcessGroup]:
    """The processes that `torchrun` started for one command, of which the first to fail prints its error; or this one.

    Whether that is this one is decided before the connection is closed, which the others take for an error of theirs.
    """
    from landscape.subject.process_group import first_to_fail, process_group

    with process_group() as processes:
        try:
            yield processes
        except Exception:
            print_errors(first_to_fail())
            raise


_errors = {"printed": True}


def print_errors(printed: bool) -> None:
    """Decide whether this process prints the error that ends it, which all processes of a group may have."""
    _errors["printed"] = printed


def prints_errors() -> bool:
    """Whether this process prints the error that ends it."""
    return _errors["printed"]


@contextmanager
def executor_of(workers: int, scheduler: str) -> Iterator[Executor]:
    """What measures: this process, so many others that share its threads, or the workers of a dask scheduler.

    Raises:
        OptionError: both are given.
        ImportError, OSError: there is no such scheduler.
    """
    from landscape.running.executor import IN_PROCESS

    at_least("workers", workers, 1)
    if scheduler and workers > 1:
        raise OptionError(f"--workers {workers} starts workers of its own, --scheduler has others; give one of them")
    if scheduler:
        from landscape.running.dask_cluster import DaskCluster

        with DaskCluster(scheduler) as cluster:
            yield cluster
    elif workers > 1:
        from landscape.running.local_processes import Processes

        with Processes(workers) as processes:
            yield processes
    else:
        yield IN_PROCESS

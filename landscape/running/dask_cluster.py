"""Measure on the workers of a dask scheduler: on this machine, on several, or in the jobs of a batch system.

What travels is a plan of a few kilobytes and the results; every worker loads the subject from its own file system. Dask
gives the tasks of a lost worker to another one, and workers may join and leave at any time.
"""

import itertools
import logging
import pickle
import queue
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from landscape.checkpoints.raw_files import json_of
from landscape.probe import Probe, Sweeps, Unit, Values, report_workers
from landscape.reporting.event_log import unlogged
from landscape.running import dask_task, executor
from landscape.running.schedule import TRIES, Chunk, Schedule
from landscape.running.work import Timed, work_of
from landscape.subject.subject import Subject

CHUNK_SECONDS = 1.0  # results come by the chunk: the most that a killed worker takes with it, if units are shorter
CONNECT_SECONDS = 20.0
POLL_SECONDS = 1.0  # between looks at which workers there are
WAIT_SECONDS = 30.0  # without workers, after which that is said
_log = logging.getLogger(__name__)
# Dask's own messages repeat what an error here says, with tracebacks.
_quiet_dask = partial(unlogged, "distributed.client", "distributed.batched", "distributed.comm")


class DaskCluster:
    """The workers of a scheduler, which is named by its address or by its scheduler file; a context manager.

    Raises:
        ImportError: dask.distributed is not installed.
        OSError: no scheduler answers there.
    """

    here = False

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        self._client: Any = None
        self._slots: dict[str, int] = {}  # see `slots`

    def __enter__(self) -> Self:
        try:
            import distributed
        except ImportError as error:
            raise ImportError("--scheduler needs dask: pip install 'landscape-probes[dask]'") from error
        connect: Any = distributed.Client
        where = {"address": self.scheduler} if "://" in self.scheduler else {"scheduler_file": self.scheduler}
        if "scheduler_file" in where and not Path(self.scheduler).is_file():
            raise FileNotFoundError(
                f"--scheduler {self.scheduler}: there is no such file; give an address such as tcp://127.0.0.1:8786, "
                "or the file that `dask scheduler --scheduler-file FILE` writes"
            )
        address = self.scheduler if "address" in where else json_of(Path(self.scheduler)).get("address")
        if not isinstance(address, str):
            raise ValueError(f"--scheduler {self.scheduler} has no address; give the file that the scheduler writes")
        with _quiet_dask():
            try:
                _refuse_silent(address)
                self._client = connect(**where, timeout=CONNECT_SECONDS, set_as_default=False, name="landscape")
            except (OSError, ValueError, TypeError, RuntimeError) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise OSError(f"no dask scheduler answers at {self.scheduler} ({reason}); start one first") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _quiet_dask(), suppress(Exception):  # it may be gone already
            self._client.close(timeout=1.0)

    @property
    def workers(self) -> int:
        """The threads of all workers; at least 1, because some may join."""
        return max(1, self._threads())

    def measure(self, probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        """Units as their chunks are finished.

        Raises:
            ValueError: the subject cannot be loaded elsewhere, or a worker has loaded another one.
            ConnectionError: the scheduler is gone.
            PoisonUnits: at the end, some units killed their workers again and again.
        """
        if not units:
            return
        work = pickle.dumps(work_of(probe, subject))
        schedule = Schedule(len(units), seconds=CHUNK_SECONDS, shared_setup=isinstance(probe, Sweeps))
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        tasks: dict[int, tuple[Any, Chunk]] = {}  # by slot, of which there is one per thread of a worker
        try:
            with _quiet_dask():
                for threads in self._present():
                    for slot in range(threads):
                        if slot not in tasks and (chunk := schedule.next(slot, threads, time.monotonic())):
                            of_chunk = pickle.dumps([units[number] for number in chunk.units])
                            task = self._client.submit(dask_task.measure, work, of_chunk, dict(self._slots), pure=False)
                            task.add_done_callback(lambda _, slot=slot: finished.put(slot))
                            tasks[slot] = task, chunk
                    for slot in _ready(finished):
                        task, chunk = tasks.pop(slot)
                        for number, values in self._results(task, chunk, slot, schedule):
                            yield units[number], values
                    if schedule.complete:
                        break
            if schedule.poisoned:
                raise executor.PoisonUnits([units[number] for number in schedule.poisoned])
        finally:
            with suppress(Exception):
                self._client.cancel([task for task, _ in tasks.values()], force=True)

    def _results(self, task: Any, chunk: Chunk, slot: int, schedule: Schedule) -> Iterator[tuple[int, Values]]:
        """The results of a task that has ended, which no other task has had."""
        from distributed.client import FutureCancelledError
        from distributed.scheduler import KilledWorker

        try:
            results = self._result(task)
        except KilledWorker:  # dask has tried several workers already
            again = schedule.lost(slot, deaths=TRIES)
            _log.warning("note: several workers died with the same %d units; %d are measured again, one by one",
                         len(chunk.units), len(again))  # fmt: skip
            return
        except (FutureCancelledError, OSError, TimeoutError) as error:
            if isinstance(error, OSError) and self._client.status == "running":
                raise  # a file that a worker could not read
            raise ConnectionError(self._gone()) from error
        for number, (seconds, values) in zip(chunk.units, results, strict=True):
            if schedule.finished(slot, number, seconds, time.monotonic()):
                yield number, values
        schedule.idle(slot)

    def _result(self, task: Any) -> list[Timed]:
        """What a task has returned: computed again, however long that takes, if a dead worker alone had it."""
        while True:
            try:
                results: list[Timed] = task.result(timeout=CONNECT_SECONDS)
                return results
            except TimeoutError:
                if task.done() or self._client.status != "running":  # it failed itself, or nobody answers
                    raise

    def _present(self) -> Iterator[int]:
        """The threads of all workers, looked up about once a second, until nobody asks any more."""
        threads, looked, alone_since, said = -1, 0.0, time.monotonic(), False
        while True:
            now = time.monotonic()
            if threads < 0 or now - looked >= POLL_SECONDS:
                before, threads, looked = threads, self._threads(), now
                if threads != before:
                    report_workers(threads)
                if threads:
                    alone_since, said = now, False
                elif now - alone_since > WAIT_SECONDS and not said:
                    said = True
                    _log.warning("note: the scheduler at %s has no workers; waiting for some to join", self.scheduler)
            yield threads

    def _threads(self) -> int:
        try:
            if self._client.status == "running":
                threads: dict[str, int] = self._client.nthreads()
                self._slots = slots(threads, self._slots)
                return sum(threads.values())
        except (OSError, TimeoutError):
            pass
        raise ConnectionError(self._gone())

    def _gone(self) -> str:
        return f"the scheduler at {self.scheduler} is gone; everything finished is stored: run the command again"


def slots(threads: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The first slot of every worker among those of its host, one per thread; workers `before` keep theirs."""
    found = {address: before[address] for address in threads if address in before}
    for address, count in threads.items():
        host = address.rpartition(":")[0]
        taken = {first + i for other, first in found.items() if other.rpartition(":")[0] == host
                 for i in range(threads[other])}  # fmt: skip
        if address not in found:
            found[address] = next(i for i in itertools.count() if taken.isdisjoint(range(i, i + count)))
    return found


def _ready(finished: queue.SimpleQueue[int]) -> Iterator[int]:
    """Slots whose tasks have ended, after waiting a moment for the first."""
    with suppress(queue.Empty):
        yield finished.get(timeout=POLL_SECONDS)
        while True:
            yield finished.get_nowait()


def _refuse_silent(address: str) -> None:
    """Raise a TimeoutError of a TCP address that says nothing: a scheduler speaks first, and dask waits for minutes."""
    place = urlsplit(address)
    if place.scheme != "tcp" or place.hostname is None or place.port is None:
        return
    try:
        connection = socket.create_connection((place.hostname, place.port), timeout=CONNECT_SECONDS)
    except OSError:
        return  # which dask tries again: the scheduler may be about to start
    with connection:
        connection.recv(1)

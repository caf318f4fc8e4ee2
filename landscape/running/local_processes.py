"""Measure in processes of this machine, which may die: their units are measured by others, and new ones are started."""

import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any

import torch

from landscape.data.dataset import Batches
from landscape.probe import Probe, Sweeps, Unit, Values, report_workers
from landscape.products.micro_batches import free_memory
from landscape.running.executor import PoisonUnits, name_of
from landscape.running.schedule import Schedule
from landscape.running.work import Work, work_of
from landscape.running.worker_process import LEAVE, Ended, Failed, Measure, Ready
from landscape.subject.subject import Subject
from landscape.subject.threads import thread_limit
from landscape.subject.weights_cache import cache_of

CHUNK_SECONDS = 10.0  # results come one by one, so that a chunk only saves set-up
POLL_SECONDS = 0.5  # after which a death is noticed that the pipe does not tell, because a child still holds it
FAILED_STARTS = 5  # deaths in a row of workers that load the subject, per worker, after which the run ends

# Neither the working directory nor the folder of a script is searched for modules, so that no `signal.py` there runs.
COMMAND = "import sys; from landscape.running.worker_process import main; main(int(sys.argv[1]), int(sys.argv[2]))"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    work: Work | None = None  # what it was told to load
    ready: bool = False  # it has loaded that
    busy: bool = False

    def end(self) -> None:
        """Kill it: what it has finished is known already."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class Processes(contextlib.AbstractContextManager["Processes"]):
    """Processes of this machine; a context manager. They are started when they are first needed.

    Each has a share of the threads of this process, and with CUDA a device of its own. They end with this process,
    even if it is killed.
    """

    here = False

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._workers: list[_Worker] = []
        self._started = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._workers:
            self._workers.pop().end()

    def measure(self, probe: Probe | Sweeps, subject: Subject, units: Sequence[Unit]) -> Generator[tuple[Unit, Values]]:
        """Units as they are finished; those of a dead worker are measured by another one.

        Raises:
            ValueError: the subject cannot be loaded elsewhere, or a worker has loaded another one.
            RuntimeError: workers die while they load the subject.
            PoisonUnits: at the end, some units killed their workers again and again.
        """
        if not units:
            return
        works = on_devices(work_of(probe, subject), subject, self.workers)
        swept = isinstance(probe, Sweeps)
        schedule = Schedule(len(units), seconds=CHUNK_SECONDS, shared_setup=swept, one_by_one=True)
        count = min(len(works), len(units))
        failed_starts = 0
        with on_the_host(subject), contextlib.ExitStack() as ending:
            ending.callback(self._end_busy)
            # A worker that is about to say that it has ended is waited for: the next run finds it ready.
            while not schedule.complete or any(w.busy and schedule.spent(w) for w in self._workers):
                self._start_missing(count)
                self._employ(works, schedule, units)
                for worker, message in self._messages():
                    if isinstance(message, tuple):
                        number, (seconds, values) = message
                        failed_starts = 0
                        if schedule.finished(worker, number, seconds, time.monotonic()):
                            yield units[number], values
                    elif isinstance(message, Ended):
                        schedule.idle(worker)
                    elif isinstance(message, Ready):
                        failed_starts = 0
                    elif isinstance(message, Failed):
                        raise message.error
                    elif message is None:
                        failed_starts += not worker.ready
                        self._bury(worker, schedule, units)
                        if failed_starts >= FAILED_STARTS * count:
                            raise RuntimeError(
                                f"{failed_starts} workers in a row died while they loaded the subject (out of memory?);"
                                f" run again with fewer workers than {self.workers}"
                            )
            if schedule.poisoned:
                raise PoisonUnits([units[number] for number in schedule.poisoned])

    def _end_busy(self) -> None:
        for worker in [worker for worker in self._workers if worker.busy]:
            self._workers.remove(worker)
            worker.end()

    def ready(self) -> list[int]:
        """Process numbers of the workers that have loaded the subject."""
        return [worker.process.pid for worker in self._workers if worker.ready]

    def _start_missing(self, count: int) -> None:
        while len(self._workers) < count:
            ours, theirs = Pipe()
            threads = max(1, thread_limit() // self.workers)
            command = [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), str(threads)]
            # A group of its own: Ctrl-C on the terminal reaches the command alone, which ends its workers.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), process_group=0)
            theirs.close()
            self._workers.append(_Worker(self._started, process, ours))
            self._started += 1
            report_workers(len(self._workers))

    def _employ(self, works: Sequence[Work], schedule: Schedule, units: Sequence[Unit]) -> None:
        """Give every idle worker what it lacks: the subject, or units."""
        for worker in [worker for worker in self._workers if not worker.busy]:
            taken = [other.work for other in self._workers if other is not worker]
            work = worker.work if worker.work in works else next((w for w in works if w not in taken), works[0])
            try:
                if worker.work != work:
                    worker.work, worker.ready, worker.busy = work, False, True
                    worker.pipe.send(work)
                elif chunk := schedule.next(worker, len(self._workers), time.monotonic()):
                    worker.busy = True
                    worker.pipe.send(Measure([(number, units[number]) for number in chunk.units]))
                    if isinstance(chunk.taken_from, _Worker):
                        chunk.taken_from.pipe.send_bytes(LEAVE + " ".join(map(str, chunk.units)).encode())
            except OSError:
                pass  # it is dead, which its pipe says too

    def _messages(self) -> Iterator[tuple[_Worker, Any]]:
        """What workers sent, after waiting for the first of them; None of a dead one, after all else."""
        found = wait([worker.pipe for worker in self._workers], POLL_SECONDS)
        for worker in list(self._workers):
            dead = worker.process.poll() is not None
            try:
                while worker.pipe in found or (dead and worker.pipe.poll()):
                    message = worker.pipe.recv()
                    if isinstance(message, Ready):
                        worker.ready, worker.busy = True, False
                    elif isinstance(message, Ended):
                        worker.busy = False
                    yield worker, message
                    if not worker.pipe.poll():
                        break
            except (EOFError, OSError):
                dead = True
            if dead:
                yield worker, None

    def _bury(self, worker: _Worker, schedule: Schedule, units: Sequence[Unit]) -> None:
        self._workers.remove(worker)
        worker.end()
        known = len(schedule.poisoned)
        again = schedule.lost(worker)
        code = worker.process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if len(schedule.poisoned) > known:
            what = f"again at {name_of(units[schedule.poisoned[-1]])}, which is left out"
        elif again:
            what = f"at {name_of(units[again[0]])}; its unfinished units, {len(again)}, are measured by others"
        else:
            what = "between units" if worker.ready else "while it loaded the subject"
        _log.warning("note: worker %d died (%s) %s", worker.number, how, what)
        report_workers(len(self._workers))


@contextlib.contextmanager
def on_the_host(subject: Subject) -> Iterator[None]:
    """Leave a GPU to the workers: weights, samples and what was prepared take memory beside the first one's."""
    images = subject.batches.images if isinstance(subject.batches, Batches) else None
    samples = [images.inputs, images.targets] if images else []
    tensors = [*subject.model.parameters(), *subject.model.buffers(), *samples]
    held = [(tensor, tensor.device) for tensor in tensors if tensor.device.type == "cuda"]
    if held:
        cache_of(subject).values.clear()
        for tensor, _ in held:
            tensor.data = tensor.data.cpu()
        free_memory()
    try:
        yield
    finally:
        for tensor, device in held:
            tensor.data = tensor.data.to(device)


def on_devices(work: Work, subject: Subject, workers: int) -> list[Work]:
    """The work of every worker: with CUDA one per device, unless a device is named, else all the same."""
    if subject.device.type != "cuda":
        return [work] * workers
    named = work.spec.device.startswith("cuda:")
    devices = [work.spec.device] if named else [f"cuda:{i}" for i in range(torch.cuda.device_count())][:workers]
    if len(devices) < workers:
        _log.info("note: %d of %d workers, one per CUDA device", len(devices), workers)
    return [replace(work, spec=replace(work.spec, device=device)) for device in devices]

"""A dask scheduler and its workers, started by the commands that a user types, on the loopback interface."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

ENVIRONMENT = {
    "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "spawn",
}  # fmt: skip
WITHIN = 300.0  # seconds in which a scheduler has started, on a machine as busy as may be


class Cluster:
    """A scheduler, whose file and log lie in a folder, and workers of one thread; a context manager."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.folder, self.file, self._options = folder, folder / "scheduler.json", options
        self._environment = {**os.environ, **ENVIRONMENT, **environment}
        self.processes: list[subprocess.Popen[bytes]] = []  # the scheduler, then the nannies of the workers
        self._start("scheduler", "--port", "0", "--scheduler-file", str(self.file), *options)
        until = time.monotonic() + WITHIN
        while not self.file.exists() or not self.file.read_text().endswith("}"):
            if time.monotonic() > until:
                self.stop()
                raise TimeoutError(f"no scheduler within {WITHIN:.0f} s; see {folder / 'log.txt'}")
            time.sleep(0.1)

    def worker(self) -> subprocess.Popen[bytes]:
        """One more worker, under a nanny that starts it again when it dies."""
        where = ("--scheduler-file", str(self.file), "--local-directory", str(self.folder))
        return self._start("worker", *where, "--nthreads", "1", *self._options)

    def stop(self) -> None:
        """Kill all."""
        for process in self.processes:
            for pid in [*children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *words, "--host", "127.0.0.1", "--no-dashboard"]
        with (self.folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, cwd=self.folder, stdout=log, stderr=log, process_group=0
            )
        self.processes.append(process)
        return process


def children(pid: int) -> list[int]:
    """The processes that a process has started, below a nanny the worker."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "resource_tracker" not in command:
            found.append(int(stat.parent.name))
    return found

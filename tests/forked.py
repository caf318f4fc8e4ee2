"""Interpreters that have imported torch already: forked from one process per session, used as `subprocess.Popen` is."""

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from select import select
from typing import Any, Self

BESIDE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"  # modules beside this one may be imported
DEVNULL = subprocess.DEVNULL

# Reads requests, of which each is followed by file descriptors: the errors and output of the process, where its exit
# code goes, and what it inherits. A guard waits for every process, so that one thread serves many.
SERVER = """
import importlib, json, os, runpy, signal, socket, sys
import torch
import landscape.cli.main, landscape.cli.measuring, landscape.running.work, landscape.training.train

place = socket.socket(fileno=int(sys.argv[1]))
main = sys.modules["__main__"]

def become(given, inherited):
    place.close()
    for file, number in zip(inherited, given["inherited"]):  # free numbers first, so that none is overwritten
        os.dup2(file, 200 + number)
        os.close(file)
    for number in given["inherited"]:
        os.dup2(200 + number, number)
        os.close(200 + number)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    how, what, *words = given["command"]
    sys.argv = [how, *words]
    code = 0
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            names = {"__name__": "__main__", "__builtins__": __builtins__}
            exec(compile(what, "<string>", "exec"), names)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

def guard(given, out, errors, status, inherited):
    os.setpgid(0, 0)
    started = os.fork()
    if not started:
        os.setpgid(0, 0)
        for file, number in ((out, 1), (errors, 2)):
            os.dup2(file, number)
        for file in (out, errors, status):
            os.close(file)
        become(given, inherited)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(started, signal.SIGKILL))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # where who asked is gone
    place.close()
    os.write(status, b"%d " % started)
    for file in (out, errors, *inherited):
        os.close(file)
    os.write(status, b"%d " % os.waitstatus_to_exitcode(os.waitpid(started, 0)[1]))
    os._exit(0)

guards = []
while True:
    message, files, _, _ = socket.recv_fds(place, 1_000_000, 64)
    if not message:
        break
    given = json.loads(message)
    for name in given["imports"]:
        importlib.import_module(name)
    if not (one := os.fork()):
        guard(given, *files[:3], files[3:])
    guards.append(one)
    for file in files:
        os.close(file)
for one in guards:  # those that have ended too: nobody has waited for them, so that no other process has their number
    os.kill(one, signal.SIGTERM)
    os.waitpid(one, 0)
"""


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1_000_000)
    command = [sys.executable, "-P", "-c", SERVER, str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0)
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


class Popen:
    """A process that runs `-c CODE WORDS` or `-m MODULE WORDS`; what it prints is read when it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        pass_fds: Sequence[int] = (),
        imports: Sequence[str] = (),
        **_: Any,
    ) -> None:
        words = [word for word in command if word not in (sys.executable, "-P")]
        self._printed = [os.memfd_create(name) for name in ("output", "errors")]
        self._texts: list[str] = []
        self._status, status = os.pipe()
        given = {
            "command": words, "folder": str(cwd or Path.cwd()), "environment": dict(os.environ if env is None else env),
            "inherited": list(pass_fds), "imports": list(imports),
        }  # fmt: skip
        socket.send_fds(_server(), [json.dumps(given).encode()], [*self._printed, status, *pass_fds])
        os.close(status)
        self._told = b""
        self.returncode: int | None = None
        self.pid = int(self._number(0))

    def _number(self, place: int, timeout: float | None = None) -> str:
        """What the guard has written, number by number: the process, and its exit code."""
        while self._told.count(b" ") <= place:
            if not select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            if not (more := os.read(self._status, 100)):
                raise RuntimeError("the server of forked processes has ended")
            self._told += more
        return self._told.split()[place].decode()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = int(self._number(1, timeout))
            os.close(self._status)
            self._texts = [Path(f"/proc/self/fd/{file}").read_text() for file in self._printed]
            for file in self._printed:
                os.close(file)
        return self.returncode

    def printed(self) -> str:
        """What it has printed as output so far."""
        return self._texts[0] if self._texts else Path(f"/proc/self/fd/{self._printed[0]}").read_text()

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text."""
        wait_until(lambda: text in self.printed() or self.poll() is not None, pause=0.001)
        assert text in self.printed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed as output and as errors, at its end."""
        self.wait(timeout)
        out, errors = self._texts
        return out, errors

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now, and its exit code is still on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)


def wait_until(happened: Callable[[], object], seconds: float = 300.0, pause: float = 0.02) -> None:
    """Wait for what other processes do, on a machine as busy as may be."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(pause)

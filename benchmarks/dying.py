"""Run something in a process that is killed before an operation on files or at a moment, and hear what it said."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from landscape.results.writer import Writer

OPERATIONS = ("open", "pwrite", "fsync", "fchmod", "replace", "unlink", "ftruncate")


def killed(body: Callable[[], None], at: int, after: float) -> tuple[bool, str]:
    """Run something in a forked process that dies before its operation `at` on files, or `after` so many seconds.

    Returns whether it was killed, and what it said.
    """
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            os.close(reading_end)
            sys.stderr = sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            _instrument(writing_end, at)
            body()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            os.write(writing_end, f"E {type(error).__name__}: {error}\n".encode())
        os._exit(code)
    os.close(writing_end)
    end = time.monotonic() + after
    ended = 0
    while not ended and time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    with os.fdopen(reading_end) as stream:
        said = stream.read()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a run failed by itself: {said.splitlines()[-1:]}")
    return os.WIFSIGNALED(status), said


def _instrument(pipe: int, at: int) -> None:
    """Acknowledge units on a pipe, mark merges, and die before an operation on files."""
    left = [at]

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, dying(getattr(os, name)))
    write, merge = Writer.write, Writer.merge

    def acknowledged(self: Writer, unit: Any, values: Any) -> None:
        write(self, unit, values)
        os.write(pipe, f"U {json.dumps(unit.index)}\n".encode())

    def marked(self: Writer) -> None:
        os.write(pipe, b"M\n")
        merge(self)
        os.write(pipe, f"m {at - left[0]}\n".encode())

    Writer.write, Writer.merge = acknowledged, marked  # type: ignore[method-assign]


def units_in(said: str) -> list[tuple[int, ...]]:
    """The acknowledged units."""
    return [tuple(json.loads(line[2:])) for line in said.splitlines() if line.startswith("U ")]


def inside_merge(said: str) -> bool:
    """Whether the last that was said is that a merge begins."""
    marks = [line[0] for line in said.splitlines() if line[:1] in "Mm"]
    return bool(marks) and marks[-1] == "M"

"""Print messages and progress: a bar with rate and remaining time on a terminal or in a notebook, lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Self

from landscape.options import format_duration

LINE_SECONDS = 30.0


class Progress:
    """Report finished units of one measurement: a context manager, called with (finished, total).

    The bar appears `after` so many seconds. Where there is none, a line is printed about twice a minute, unless `lines`
    is false.
    """

    def __init__(self, what: str, *, quiet: bool = False, after: float = 0.0, lines: bool = True) -> None:
        self._what, self._quiet, self._after, self._lines = what, quiet, after, lines
        self._start = self._printed = self._entered = time.monotonic()
        self._first: int | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if not self._after:
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, finished: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:  # the clock starts after the set-up, such as making directions
            self._first, self._start = finished, now
        if self._bar is None and self._after and now - self._entered >= self._after and finished < total:
            self._show()
        rate = (finished - self._first) / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, total=total, rate=f"{rate:.3g}/s" if rate else "")
        elif self._lines and not self._quiet and now - self._printed >= LINE_SECONDS:
            self._printed = now
            speed = f", {rate:.3g}/s, about {format_duration((total - finished) / rate)} left" if rate else ""
            say(f"{self._what} {finished}/{total}, {100 * finished / total:.0f} %{speed}")

    def _show(self) -> None:
        if self._quiet or not _has_bar():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=None, rate="")


def in_notebook() -> bool:
    """Whether a notebook runs this process."""
    return "ipykernel" in sys.modules


def _has_bar() -> bool:
    """Whether a bar can be shown: on a terminal, or in a notebook with the widgets that it needs."""
    return sys.stderr.isatty() or (in_notebook() and find_spec("ipywidgets") is not None)


def is_main_process() -> bool:
    """Whether this process prints and draws: the only one, or the first that `torchrun` started."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"


def say(text: str, *, quiet: bool = False) -> None:
    """Print one line for the user on stderr."""
    if not quiet and is_main_process():
        print(text, file=sys.stderr, flush=True)


class _Printer(logging.Handler):
    """Prints log records for the user."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def print_log(*, quiet: bool = False) -> Iterator[None]:
    """Print what the library logs while the block runs: estimates, choices, fallbacks; only warnings if quiet."""
    logger, handler = logging.getLogger("landscape"), _Printer()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

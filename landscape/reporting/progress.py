"""Print messages, tables and progress: a bar with the remaining time on a terminal or in a notebook, else lines."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

from landscape.options import counted, format_duration, printable
from landscape.probe import Estimates, Stages, listening
from landscape.reporting.event_log import logging_to, record

FORECAST_SECONDS = 10.0  # of a run, or of its preparation, below which no forecast is printed
LINE_SECONDS = 30.0  # between lines
RECORD_SECONDS = 1.0  # between entries of the log
DRAWN_SECONDS = 0.2  # between updates of the products within a unit
SEVERAL = 8  # finished units, after which the others are expected to take as many products as these, on average
UNIT_SECONDS = 2.0  # of a first unit, after which its products give the forecast
TIMED_SECONDS = 0.5  # of finished units, after which they give the forecast
LONG_SECONDS = 600.0  # from here on a forecast names options for a shorter run


def forecast_level(seconds: float) -> int:
    """The log level of a forecast: it is printed by default where it is worth waiting for."""
    return logging.INFO if seconds >= FORECAST_SECONDS else logging.DEBUG


@dataclass(frozen=True)
class Advice:
    """What the forecast of a run needs to know about it."""

    silent: bool = False  # the run makes its own estimate
    at_most: bool = False  # it may stop before all units are measured
    batches: bool = False  # it has an option for the number of mini-batches, which are its units
    samples: int = 0  # samples, and those of a mini-batch; 0 if a part of them would not be shorter
    batch_size: int = 1

    @classmethod
    def of(cls, probes: Sequence[Any], subject: Any) -> Advice:
        """From the probes that are measured, with their parameters, and the loaded subject."""
        return cls(
            silent=any(isinstance(probe, Estimates) for probe in probes),
            at_most=any(isinstance(probe, Stages) and getattr(probe, "tol", 0) for probe in probes),
            batches=all(
                hasattr(p, "batches") and getattr(p, "scope", "batch") == "batch" and not getattr(p, "per_layer", False)
                for p in probes
            ),
            samples=len(subject), batch_size=subject.batch_size,
        )  # fmt: skip

    def shorter(self, units: float, seconds: float) -> str:
        """Options that bring a long run down to about ten minutes, as the end of a sentence; "" for others."""
        fits = LONG_SECONDS / seconds
        if fits >= 1:
            return ""
        if self.batches:
            count = max(int(units * fits), 1)
            return f"; --batches {count} takes about {format_duration(seconds * count / units)}" if units > 1 else ""
        count = max(int(self.samples * fits) // self.batch_size, 1) * self.batch_size
        if count >= self.samples:
            return ""
        return f"; --samples {count} takes about {format_duration(seconds * count / self.samples)}"


class Progress:
    """Report finished units of one measurement: a context manager, called with (finished, total).

    Of a run of more than ten seconds a forecast is printed once, from the first units or, where a unit takes long, from
    its first Hessian products; such a unit also shows how many products are made. No run is timed for it beforehand.

    The bar appears `after` so many seconds. Where there is none, a line is printed twice a minute, also while no unit
    is finished, unless `lines` is false, which also leaves out forecasts of less than half a minute.
    """

    def __init__(
        self, what: str, *, quiet: bool = False, after: float = 0.0, lines: bool = True, advice: Advice | None = None
    ) -> None:
        self._what, self._quiet, self._after, self._lines = what, quiet, after, lines
        self._advice = advice or Advice(silent=True)
        self._start = self._printed = self._entered = self._drawn = time.monotonic()
        self._first: float | None = None  # units that were finished when the clock started
        self._finished: float = 0
        self._total = 0
        self._began: float | None = None  # when the first sweep with Hessian products did
        self._before: float = 0  # units that were finished then
        self._products, self._earlier, self._expected = 0, 0, 0.0  # of this unit, of those before, of one unit
        self._forecast_due = not quiet and not self._advice.silent
        self._bar: Any = None
        self._task: Any = None
        self._listening = contextlib.ExitStack()
        self._workers = 0  # other processes that measure
        self._recorded = -RECORD_SECONDS
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self._listening.enter_context(listening(self))
        if not self._after:
            self._show()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._print_lines,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._listening.close()
        if self._bar is not None:
            self._bar.stop()

    def units(self, finished: int, total: int) -> None:
        self._finished, self._total = finished, total
        self._first = self._began = None
        self._products = self._earlier = 0

    def workers(self, count: int) -> None:
        """So many other processes measure now."""
        self._workers = count
        record("workers", what=self._what, workers=count)

    def products(self, made: int, per_unit: int) -> None:
        """Hessian products were made; or a sweep begins, in every unit of which so many are expected."""
        if per_unit and self._began is None:
            self._began, self._before, self._expected = time.monotonic(), self._finished, float(per_unit)
            self._products = 0
        self._products += made
        if not made or self._began is None:
            return
        now = time.monotonic()
        if self._finished >= self._before + SEVERAL:  # of the first ones side by side all products count for one
            self._expected = self._earlier / (self._finished - self._before)
        if self._forecast_due and (self._finished > self._before or now - self._began >= UNIT_SECONDS):
            left = (self._total - self._finished) * self._expected - self._products
            each = (now - self._began) / (self._earlier + self._products)
            self._forecast(now - self._began + each * max(left, 0.0), self._total - self._before)
        if now - self._drawn >= DRAWN_SECONDS:
            self._drawn = now
            self._draw_products(now)

    def __call__(self, finished: float, total: int) -> None:
        now = time.monotonic()
        if self._first is None:  # the clock starts after the set-up, such as making directions
            self._first, self._start = finished, now
        self._finished, self._total = finished, total
        self._earlier, self._products = self._earlier + self._products, 0
        if self._bar is None and self._after and now - self._entered >= self._after and finished < total:
            self._show()
        rate, _ = self._speed(now)
        seconds = (total - self._first + 1) / rate if rate else 0.0
        timed = self._began is None and now - self._start >= TIMED_SECONDS
        if self._forecast_due and timed:
            self._forecast(seconds, total - self._first + 1)
        if self._bar is not None:
            shown = (f"{rate:.3g}/s" if rate else "") + self._workers_in_words
            self._bar.update(self._task, completed=finished, total=total, rate=shown)
        else:
            self._print_line(now)
        if now - self._recorded >= RECORD_SECONDS or finished == total:
            self._record(now)

    def _print_lines(self) -> None:
        """Print a line twice a minute also while units take long."""
        while not self._left.wait(LINE_SECONDS):
            now = time.monotonic()
            if self._total:
                self._record(now)
            if self._bar is None and self._total:
                self._print_line(now)

    def _print_line(self, now: float) -> None:
        if not self._lines or self._quiet or now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        rate, left = self._speed(now)
        speed = f", {rate:.3g}/s, about {format_duration(left)} left" if rate else ""
        within = f", {self._products_in_words}" if self._products and self._began is not None else ""
        done = f"{self._finished}/{self._total}, {100 * self._finished / self._total:.0f} %{within}"
        say(f"{self._what} {done}{speed}{self._workers_in_words}", again=True)

    def _record(self, now: float) -> None:
        self._recorded = now
        rate, left = self._speed(now)
        counts: dict[str, Any] = {"finished": self._finished, "total": self._total, "workers": self._workers or 1}
        record("progress", what=self._what, **counts, rate=rate or None, seconds_left=left if rate else None)

    def _speed(self, now: float) -> tuple[float, float]:
        """Units per second since the clock started, and the seconds that are left; 0 for both while unknown."""
        rate = (self._finished - (self._first or 0)) / max(now - self._start, 1e-9) if self._first is not None else 0.0
        return rate, (self._total - self._finished) / rate if rate else 0.0

    @property
    def _workers_in_words(self) -> str:
        return f", {counted(self._workers, 'worker')}" if self._workers else ""

    def _forecast(self, seconds: float, units: float) -> None:
        self._forecast_due = False
        if seconds < (FORECAST_SECONDS if self._lines else LINE_SECONDS):
            return
        about = f"{'at most' if self._advice.at_most else 'about'} {format_duration(seconds)}"
        say(f"{self._what}: {about}{self._advice.shorter(units, seconds)}")

    def _draw_products(self, now: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=self._total or None, rate=self._products_in_words)
        elif self._total:
            self._print_line(now)

    @property
    def _products_in_words(self) -> str:
        expected = f" of about {self._expected:,.0f}" if self._products <= self._expected else ""
        return f"product {self._products:,}{expected}"

    def _show(self) -> None:
        if self._quiet or not _has_bar():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),  # a label is no markup
            TextColumn("{task.fields[rate]}", markup=False), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(),
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


_printed: list[set[str]] = []  # the lines of every command that runs, the last one innermost


def say(text: str, *, quiet: bool = False, again: bool = False) -> None:
    """Print one line for the user on stderr, and put it into the log if there is one.

    A command prints a line once, unless it is to appear `again`: what is the same for several networks is said once.
    """
    record("message", text=text)
    if not quiet:
        _print(text, again=again)


def _print(text: str, *, again: bool = False) -> None:
    if not is_main_process() or (not again and any(text in lines for lines in _printed)):
        return
    for lines in _printed[-1:]:
        lines.add(text)
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


class _Printer(logging.Handler):
    """Prints log records for the user."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(record.getMessage())


@contextlib.contextmanager
def print_log(*, quiet: bool = False, verbose: bool = False) -> Iterator[None]:
    """Print what the library logs while the block, a command, runs: each line once.

    By default that is what changes how a number is to be read. `verbose` adds how it is computed (engine, memory,
    threads), which the library logs as DEBUG; `quiet` leaves warnings alone.
    """
    handler = _Printer(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    _printed.append(set())
    try:
        with logging_to(handler):
            yield
    finally:
        _printed.pop()


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with common keys as aligned text under a header, without columns that are empty."""
    if not rows:
        return "(empty)"
    names = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    """Four digits of a fraction, nothing for NaN."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return printable(value)

"""Write what a command does as JSON lines, for programs that watch it (`--log FILE`)."""

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

_file: ContextVar[IO[str] | None] = ContextVar("_file", default=None)


@contextlib.contextmanager
def event_log(path: Path | None, **about: Any) -> Iterator[None]:
    """Append events to a file while the block runs: `start` with what it is about, and `end` with the error if any.

    All that the library logs is among them, also what is printed with `--verbose` alone.

    Raises:
        OSError: the file cannot be written.
    """
    if path is None:
        yield
        return
    with path.open("a", encoding="utf-8", buffering=1) as file:
        token = _file.set(file)
        try:
            record("start", **about)
            try:
                with logging_to(_Recorder(logging.DEBUG)):
                    yield
            except BaseException as error:
                name = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
                record("end", error=" ".join(str(error).split()) or name)
                raise
            record("end", error=None)
        finally:
            _file.reset(token)


def record(event: str, **fields: Any) -> None:
    """Append one event: a JSON object in a line, with its time (ISO 8601, UTC); nothing where no log is open."""
    if (file := _file.get()) is None:
        return
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    with contextlib.suppress(OSError):  # a full disk must not end a measurement
        file.write(json.dumps({"time": now, "event": event, **finite}, default=str) + "\n")


class _Recorder(logging.Handler):
    """Appends log records as events."""

    def emit(self, entry: logging.LogRecord) -> None:
        record("message", text=entry.getMessage())


@contextlib.contextmanager
def unlogged(*names: str) -> Iterator[None]:
    """Lose what loggers log while the block runs."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Pass what the library logs to a handler while the block runs, from the level of the handler on."""
    logger = logging.getLogger("landscape")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or handler.level, handler.level))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

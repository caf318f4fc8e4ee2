"""Steps of a stage: each makes one row, which is appended to a file at once; a budget of time ends a stage early."""

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

Key = tuple[str | int, ...]
Row = dict[str, Any]
Rows = Mapping[Key, Row]  # those of one stage
P = ParamSpec("P")
T = TypeVar("T")
LONGEST_ERROR = 160  # characters of an error that a row keeps


@dataclass(frozen=True)
class Settings:
    """What every stage needs to know."""

    device: torch.device
    small: bool  # tiny sizes: whether everything runs, not how fast
    folder: Path  # for files that a later call can use again
    until: float = float("inf")  # end of the stage's time, by `time.monotonic()`
    only: tuple[str, ...] = ()  # beginnings of keys, such as resnet50-224; empty: every case
    engines: tuple[str, ...] = ()  # parts of keys, such as traced; empty: all

    def wants(self, key: Key) -> bool:
        """Whether a row is among those that were asked for."""
        name = "-".join(map(str, key))
        case = any(name.startswith(one) for one in self.only or ("",))
        return case and (not self.engines or any(part in self.engines for part in key))


@dataclass(frozen=True)
class Step:
    """One row and how to make it. A key that is known already is never measured again."""

    key: Key
    measure: Callable[[], Row]


class Stage(Protocol):
    """A module of this package: its steps cost nothing before they are measured."""

    TITLE: str
    ABOUT: str  # what was measured and how, below the title

    def steps(self, settings: Settings) -> Sequence[Step]: ...

    def tables(self, rows: Rows) -> str: ...  # of rows without an error


class OutOfTime(Exception):
    """A step did not end within the time that was left."""


def _complete(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class RowsFile:
    """Rows of all stages in a JSON-lines file, whose first line says to which machine and sizes they belong.

    Raises:
        ValueError: the file holds rows of another machine or of other sizes.
    """

    def __init__(self, path: Path, origin: str) -> None:
        self.path, self.stages = path, dict[str, dict[Key, Row]]()
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"origin": origin}) + "\n")
            return
        if (found := json.loads(lines[0])["origin"]) != origin:
            raise ValueError(
                f"{path} holds rows of {found}, and this run is of {origin}; give another folder with --out"
            )
        whole = [line for line in lines[1:] if _complete(line)]  # a killed process may leave half a line
        for stage, key, row in (json.loads(line)["row"] for line in whole):
            self.stages.setdefault(stage, {})[tuple(key)] = row
        if (kept := "".join(f"{line}\n" for line in (lines[0], *whole))) != path.read_text():
            path.write_text(kept)

    def of(self, stage: str) -> Rows:
        return self.stages.get(stage, {})

    def add(self, stage: str, key: Key, row: Row) -> None:
        self.stages.setdefault(stage, {})[key] = row
        with self.path.open("a") as stream:
            stream.write(json.dumps({"row": (stage, key, row)}) + "\n")


def run(name: str, stage: Stage, settings: Settings, file: RowsFile, added: Callable[[], object] = lambda: None) -> int:
    """Measure the missing rows of a stage while its time lasts, with a call after each; returns how many are left.

    A step is begun if the longest one of its kind so far would still fit, of a new kind the longest of all; the first
    one always is, so that every call gets on.
    """
    missing = [step for step in stage.steps(settings) if settings.wants(step.key) and step.key not in file.of(name)]
    longest: dict[Key, float] = {}
    left = 0
    free_memory()
    for step in missing:
        start, kind = time.monotonic(), tuple(part for part in step.key if isinstance(part, str))
        if longest and start + longest.get(kind, max(longest.values())) > settings.until:
            left += 1
            continue
        try:
            row = measured(step, settings.device)
        except OutOfTime as error:
            if longest:  # it may fit into the whole time of another call
                left += 1
                continue
            row = {"error": str(error)}
        file.add(name, step.key, row)
        longest[kind] = max(longest.get(kind, 0.0), time.monotonic() - start)
        say = row.get("error") or f"{time.monotonic() - start:.1f} s"
        print(f"{name}: {' '.join(map(str, step.key))}: {say}", flush=True)
        added()
    return left


def measured(step: Step, device: torch.device) -> Row:
    """The row of a step, or of the error that it raised, which is a result too.

    Raises:
        OutOfTime: the time of the stage is over.
        RuntimeError: the device no longer works, so that a new process is needed.
    """
    with _listening() as heard:
        try:
            row = step.measure()
        except OutOfTime:
            raise
        except Exception as error:  # of other libraries too, and the lack of memory
            text = " ".join(str(error).split())
            row = {"error": f"{type(error).__name__}: {text}"[:LONGEST_ERROR]}
    if heard.found:
        row["messages"] = list(heard.found)
    if "error" in row:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return row


_held: dict[Any, Any] = {}


def alone_in_memory(function: Callable[P, T]) -> Callable[P, T]:
    """Keep the last value of such functions, of all together: what a value needs is free when the next is made."""

    @wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> T:
        key = function, args
        if key not in _held:
            free_memory()
            _held[key] = function(*args, **kwargs)
        value: T = _held[key]
        return value

    return kept


def free_memory() -> None:
    """Return what is kept too."""
    _held.clear()
    return_memory()


def return_memory() -> None:
    """Return what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def failed(rows: Rows) -> list[str]:
    """A line for every row that holds an error."""
    return [f"- {' '.join(map(str, key))}: {row['error']}" for key, row in rows.items() if "error" in row]


def messages(rows: Rows) -> list[str]:
    """A line for every message of the package, with the first row that gave it."""
    first: dict[str, list[Key]] = {}
    for key, row in rows.items():
        for message in row.get("messages", ()):
            first.setdefault(message, []).append(key)
    return [f"- {message} ({' '.join(map(str, keys[0]))}; {len(keys)} in all)" for message, keys in first.items()]


class _Messages(logging.Handler):
    """Different messages of the parts that choose how something is computed, at most a few."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.found) < 5:
            self.found[record.getMessage()[:LONGEST_ERROR]] = None


@contextmanager
def _listening() -> Iterator[_Messages]:
    handler = _Messages()
    logs = [logging.getLogger(f"landscape.{part}") for part in ("products", "subject", "weight_space")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.DEBUG)
        log.addHandler(handler)
    try:
        yield handler
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)

"""Shared parts of the benchmarks: arguments, time and table rows."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

if find_spec("landscape") is None:  # not installed: the checkout itself
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Work = Callable[[], object]


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with an option `--name` for every default value, of the default's type."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return made


def clock_of(device: torch.device | str) -> Callable[[], float]:
    """Process time for a CPU, which other programs share; for a GPU the wall clock, once its work is done."""
    if torch.device(device).type != "cuda":
        return time.process_time

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def seconds(work: Work, clock: Callable[[], float] = time.process_time) -> float:
    start = clock()
    work()
    return clock() - start


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*names: str) -> str:
    return f"{row(*names)}\n{row(*['---'] * len(names))}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join([header(*columns), *(row(*cells) for cells in rows)])

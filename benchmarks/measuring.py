"""Shared parts of the benchmarks: arguments, subjects, time and memory of a process, and table rows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import landscape
from landscape.subject.subject import Subject

Work = Callable[[], object]


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with an option `--name` for every default value, of the default's type."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return made


def trained_models(made: argparse.ArgumentParser, *names: str) -> argparse.ArgumentParser:
    """The parser with the arguments of `trained`."""
    made.add_argument("--models", nargs="+", default=list(names))
    made.add_argument("--data", default="cifar10")
    made.add_argument("--data-root", type=Path)
    made.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    return on_device(made)


def on_device(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with `--device`."""
    made.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:1")
    return made


def trained(arguments: argparse.Namespace, name: str, *, file: str = "final.pt", **options: Any) -> Subject:
    """A demo network from its run on the training set."""
    return landscape.load(
        arguments.checkpoints / f"{name}-{arguments.data}" / file, data=arguments.data,
        data_root=arguments.data_root, split="train", device=arguments.device, **options,
    )  # fmt: skip


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


def peak_of(work: Work, device: torch.device | str = "cpu") -> float:
    """Peak memory during some work above that before it, in MiB: of this process (Linux), or allocated on a GPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - allocated) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(*names: str) -> str:
    return f"{row(*names)}\n{row(*['---'] * len(names))}"

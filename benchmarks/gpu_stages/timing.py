"""Time, memory and idle time of work on a device."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import measuring
import torch
from measuring import Work
from torch.profiler import ProfilerActivity, profile

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace that occupy the device


def seconds(work: Work, device: torch.device) -> float:
    """Seconds of some work, the device's part included: wall time on a GPU, process time on a CPU, which is shared."""
    return measuring.seconds(work, measuring.clock_of(device))


def typical(work: Work, device: torch.device, repeats: int) -> float:
    """Median seconds of some work, after a warm-up."""
    work()
    return statistics.median(seconds(work, device) for _ in range(repeats))


def peak_gib(work: Work, device: torch.device) -> float:
    """Most memory allocated on a GPU during some work, all that was there before included, in GiB; NaN on a CPU."""
    if device.type != "cuda":
        work()
        return math.nan
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 2**30


def share_outside_kernels(work: Work, device: torch.device) -> float:
    """1 - (time in which a GPU computes or copies) / (wall time without the profiler).

    NaN on a CPU, and where the profiler sees no kernel. The work runs three times, the first as a warm-up; it should
    take no more than some seconds, for every kernel is recorded.
    """
    if device.type != "cuda":
        return math.nan
    work()
    wall = seconds(work, device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        busy = busy_seconds(json.loads(path.read_text())["traceEvents"])
    return max(0.0, 1 - busy / wall) if busy else math.nan


def busy_seconds(events: Iterable[Mapping[str, object]]) -> float:
    """Length of the union of all kernels and copies of a Chrome trace, whose times are in microseconds."""
    spans = sorted(
        (float(str(event["ts"])), float(str(event["ts"])) + float(str(event["dur"])))
        for event in events
        if event.get("cat") in ON_DEVICE and "dur" in event
    )
    total, end = 0.0, -math.inf
    for begin, finish in spans:
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total / 1e6


def shown(number: float, form: str) -> str:
    """A number, or n/a for NaN."""
    return "n/a" if math.isnan(number) else form.format(number)

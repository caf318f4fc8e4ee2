"""The axes of surfaces and lines: ranges and resolutions in words, and the coordinates that they mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from landscape.options import OptionError

Span = tuple[float, float]


def ticks(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spaced coordinates whose 0 and 1 are exact, so that a checkpoint there is itself."""
    values = np.linspace(low, high, count)
    for exact in (0.0, 1.0):
        values = np.where(np.abs(values - exact) < 1e-12 * (high - low), exact, values)
    return values


def through_checkpoints(count: int) -> Span:
    """A range around 0 and 1 that has both among its ticks, and about a sixth of them on either side, one at least."""
    between = max(min(round((count - 1) / 1.5), count - 3), 1)
    before = (count - 1 - between) // 2
    return -before / between, (count - 1 - before) / between


def through_centre(span: Span, count: int) -> Span:
    """A range around 0 moved by half a step at most, so that 0 is among its ticks."""
    low, high = span
    step = (high - low) / (count - 1)
    before = min(max(round(-low / step), 0), count - 1)
    return -before * step, (count - 1 - before) * step


def pair(text: str, kind: type, name: str) -> tuple[Any, Any]:
    """`N` or `NX,NY`."""
    try:
        parts = [kind(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2):
        raise OptionError(f"--{name} {text} is not understood; ask for N or NX,NY")
    return parts[0], parts[-1]


def spans(text: str) -> tuple[Span, Span]:
    """`R`, `LOW:HIGH` or `XLOW:XHIGH,YLOW:YHIGH` as ((x_low, x_high), (y_low, y_high))."""
    try:
        found = []
        for part in text.split(","):
            numbers = [float(number) for number in part.split(":")]
            low, high = (-numbers[0], numbers[0]) if len(numbers) == 1 else numbers
            found.append((low, high))
    except ValueError:
        found = []
    if len(found) not in (1, 2):
        raise OptionError(f"--range {text} is not understood; ask for R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH")
    for low, high in found:
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise OptionError(f"--range {text} has its low end {low:g} not below its high end {high:g}; swap them")
    return found[0], found[-1]

"""The coordinates along the axes of surfaces and lines."""

from __future__ import annotations

import numpy as np

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

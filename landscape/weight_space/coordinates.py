"""Choose the coordinates along the axes of surfaces and lines."""

import numpy as np

Span = tuple[float, float]


def ticks(low: float, high: float, count: int) -> np.ndarray:
    """Evenly spaced coordinates with exact 0 and 1, so that the checkpoints there are reproduced exactly."""
    values = np.linspace(low, high, count)
    for exact in (0.0, 1.0):
        values = np.where(np.abs(values - exact) < 1e-12 * (high - low), exact, values)
    return values


def beside_ends(values: np.ndarray) -> np.ndarray:
    """Coordinates with more between 0 and 1, a quarter and a sixteenth of a step from each: there low barriers hide.

    Of an excess a t - b t^2 that a step is too long to see, these see at least 0.64 of the top, down to a root at a
    sixteenth of the step.
    """
    between = values[(values >= 0.0) & (values <= 1.0)]
    if not {0.0, 1.0} <= set(between):
        return values
    shares = np.array([0.25, 0.0625])
    return np.union1d(values, np.append(shares * between[1], 1.0 - shares * (1.0 - between[-2])))


def through_checkpoints(count: int) -> Span:
    """A range with 0 and 1 among its ticks, and about a sixth of the ticks (at least one) on either side."""
    between = max(min(round((count - 1) / 1.5), count - 3), 1)
    before = (count - 1 - between) // 2
    return -before / between, (count - 1 - before) / between


def through_centre(span: Span, count: int) -> Span:
    """The range shifted by at most half a step, so that 0 is among its ticks."""
    low, high = span
    step = (high - low) / (count - 1)
    before = min(max(round(-low / step), 0), count - 1)
    return -before * step, (count - 1 - before) * step

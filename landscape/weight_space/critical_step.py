"""The length along an update at which the loss exceeds its start, from forward passes alone (arXiv 2601.16979)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

PASSES = 10  # forward passes of a search, that of the start included
ROUNDING = 1e-9
WIDTH = 2.0 ** (1 / 8)  # ratio of the ends of the last bracket: their geometric mean is within 2^(1/16) - 1 = 4.4 %


@dataclass(frozen=True)
class CriticalStep:
    """How often an update can be lengthened before the loss exceeds its start."""

    multiple: float  # of the update; NaN where there is none, or the passes did not bracket it
    passes: int  # forward passes, that of the start included
    converged: bool  # the multiple is known within 2^(1/16) - 1 of itself


def critical_step(
    change: Callable[[float], float], slope: float, *, guess: float | None = None, passes: int = PASSES
) -> CriticalStep:
    """The multiple c > 0 of an update at which the change of the loss turns positive, within 2^-4 of itself.

    The multiple is bracketed by doubling or halving from a guess and bisected on the logarithmic scale. The search
    assumes a single crossing: of several, it finds one. It differs from the published code by its guess, which is
    where a parabola of the same slope returns to its start: a quadratic takes 7 passes however far away that is.

    Args:
        change: c -> loss after c times the update - loss at the start; each call is a forward pass, the first at c = 1.
        slope: its derivative at 0. Where it is not negative the loss exceeds its start at once, and there is no c.
        guess: of c, such as -2 slope / u'Hu. None takes it from the slope and the change at c = 1.
        passes: at most so many forward passes, with the one of the start, which the caller has made.
    """
    if not slope < 0:
        return CriticalStep(math.nan, 1, False)
    low, high, made = 0.0, math.inf, 1

    def probe(at: float) -> float:
        """Narrow the bracket by a forward pass, if the point lies inside and a pass is left."""
        nonlocal low, high, made
        if not low < at < high or made >= passes:
            return math.nan
        made += 1
        found = change(at)
        if found <= 0:
            low = at
        else:  # also where it is not finite
            high = at
        return found

    bend = probe(1.0) - slope  # of c^2
    if guess is None or not 0 < guess < math.inf:
        guess = -slope / bend if 0 < bend < math.inf else 2.0
    probe(guess * math.sqrt(2))
    probe(guess / math.sqrt(2))
    while made < passes and not (low and high <= WIDTH * low * (1 + ROUNDING)):
        probe(high / 2 if not low else 2 * low if math.isinf(high) else math.sqrt(low * high))
    if not low or math.isinf(high):
        return CriticalStep(math.nan, made, False)
    return CriticalStep(math.sqrt(low * high), made, high <= WIDTH * low * (1 + ROUNDING))

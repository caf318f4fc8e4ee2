"""Decide how often to measure: as often as asked for, while that stays a small share of the time of training."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from landscape.subject.device import wait_for

Kind = Literal["row", "eigenvalues", "check"]  # without eigenvalues; with; with those from a random start too
ROWS = 0.95  # share of the overhead that rows without eigenvalues may take
UNMEASURED = 0.02  # a low guess of the cost of the first row without eigenvalues, in units of the first measurement
UNCHECKED = 0.5  # cost of a measurement without the check by a random start, in units of one with it


class Budget:
    """Wall time of the training and of the measurements, which may take `overhead` of it.

    The rule: the first measurement, with eigenvalues, is made whatever it costs. A later one with eigenvalues is made
    if the measurements so far and the one to come, which is taken to cost the mean of its kind, stay below
    `overhead` times the training time so far. Else a row without them is made, if all such rows stay below
    19/20 of that and, with the measurements of eigenvalues after the first, below all of it, at the next step that
    could have a row; else the step is left out. Rows that take longer than others, as the first one does, whose search
    has no guess, are so paid for by the others, and each is within one interval. The first measurement begins with a
    random vector and takes about twice as many products as one without that check, of which the first is therefore
    expected to cost half as much. So no eigenvalues are measured before the first have been paid for, rows go on
    meanwhile, and whenever a row is due those before it have taken at most `overhead` of the training, or 19/20 of it
    and the first measurement. An infinite overhead leaves out nothing. Training time is all time that is not spent
    here, from the construction on.

    Which steps are measured therefore depends on the clock; times and left-out steps are stored with every row.
    """

    def __init__(self, overhead: float, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.overhead, self._device, self._clock = overhead, device, clock
        self.spent = 0.0  # seconds of all measurements
        self.last = 0.0  # of the last one
        self._began = clock()
        self._costs: dict[Kind, float] = {}  # means over the measurements of each kind
        self._counts = Counter[Kind]()
        self._first, self._rows = 0.0, 0.0  # seconds of the first measurement, and of all rows without eigenvalues

    @property
    def training(self) -> float:
        """Seconds that were not spent on measurements."""
        return self._clock() - self._began - self.spent

    def allows(self, kind: Kind, interval: float) -> bool:
        """Whether a measurement of a kind may be made now; `interval` seconds of training come before the next."""
        return not self._costs or self.due(kind, interval) <= self.training

    def due(self, kind: Kind, interval: float) -> float:
        """The training time from which on the next measurement may be made, in seconds; after the first one."""
        cost = self.expected(kind)
        if kind == "row":
            return max((self._rows + cost) / ROWS, self.spent - self._first + cost) / self.overhead - interval
        return (self.spent + cost) / self.overhead

    def expected(self, kind: Kind) -> float:
        """What the next measurement is taken to cost, in seconds; after the first one."""
        unknown = {"row": UNMEASURED, "eigenvalues": UNCHECKED, "check": 1.0}[kind]
        return self._costs.get(kind, max(self._costs.values()) * unknown)

    def now(self) -> float:
        return self._clock()

    @contextmanager
    def measuring(self, kind: Kind) -> Iterator[None]:
        """Take the time of a measurement; a GPU's pending work is that of the training."""
        wait_for(self._device)
        began = self._clock()
        try:
            yield
        finally:
            wait_for(self._device)
            self.last = self._clock() - began
            self._first = self._first if self._costs else self.last
            self._counts[kind] += 1
            mean = self._costs.get(kind, 0.0)
            self._costs[kind] = mean + (self.last - mean) / self._counts[kind]
            self._charge(kind, self.last)

    @contextmanager
    def beside(self, kind: Kind = "row") -> Iterator[None]:
        """Take the time of what belongs to a measurement: keeping the weights before an update, writing a row."""
        began = self._clock()
        try:
            yield
        finally:
            self._charge(kind, self._clock() - began)

    def _charge(self, kind: Kind, seconds: float) -> None:
        self.spent += seconds
        self._rows += seconds if kind == "row" else 0.0

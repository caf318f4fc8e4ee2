"""Decide how often to measure: as often as asked for, while that stays a small share of the time of training."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
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
        self.overhead, self._device, self.now = overhead, device, clock
        self.spent = self.last = 0.0  # seconds of all measurements, and of the last one
        self._began = clock()
        self._costs: dict[Kind, list[float]] = {}  # seconds of the measurements of each kind
        self._rows = 0.0  # seconds of all rows without eigenvalues

    @property
    def training(self) -> float:
        """Seconds that were not spent on measurements."""
        return self.now() - self._began - self.spent

    def allows(self, kind: Kind, interval: float) -> bool:
        """Whether a measurement of a kind may be made now; `interval` seconds of training come before the next."""
        return not self._costs or self.due(kind, interval) <= self.training

    def due(self, kind: Kind, interval: float) -> float:
        """The training time from which on the next measurement may be made, in seconds; after the first one."""
        cost, (first, *_) = self.expected(kind), next(iter(self._costs.values()))
        if kind == "row":
            return max((self._rows + cost) / ROWS, self.spent - first + cost) / self.overhead - interval
        return (self.spent + cost) / self.overhead

    def expected(self, kind: Kind) -> float:
        """What the next measurement is taken to cost, in seconds; after the first one."""
        unknown = {"row": UNMEASURED, "eigenvalues": UNCHECKED, "check": 1.0}[kind]
        means = {known: fmean(costs) for known, costs in self._costs.items()}
        return means.get(kind, max(means.values()) * unknown)

    @contextmanager
    def measuring(self, kind: Kind) -> Iterator[None]:
        """Take the time of a measurement; a GPU's pending work is that of the training."""
        wait_for(self._device)
        with self.beside(kind):
            yield
            wait_for(self._device)
        self._costs.setdefault(kind, []).append(self.last)

    @contextmanager
    def beside(self, kind: Kind = "row") -> Iterator[None]:
        """Take the time of what belongs to a measurement: keeping the weights before an update, writing a row."""
        began = self.now()
        try:
            yield
        finally:
            self.last = self.now() - began
            self.spent += self.last
            self._rows += self.last if kind == "row" else 0.0

"""Decide how often to measure: as often as asked for, while that stays a small share of the time of training."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from landscape.subject.device import wait_for

UNCHECKED = 0.5  # cost of a measurement without the check by a random start, in units of one with it


class Budget:
    """Wall time of the training and of the measurements, which may take `overhead` of it.

    The rule: the first measurement is made whatever it costs. A later one is made if the measurements so far and the
    one to come, which is taken to cost as much as the last of its kind, stay below `overhead` times the training time
    so far; else the step is left out. The first one begins with a random vector and takes about twice as many products
    as one without that check, of which the first is therefore expected to cost half as much. So no measurement is made
    before the first has been paid for, and at the end measurements have taken at most `overhead` of the training, or
    the first one alone. An infinite overhead leaves out nothing. Training time is all time that is not spent here, from
    the construction on.

    Which steps are measured therefore depends on the clock; times and left-out steps are stored with every row.
    """

    def __init__(self, overhead: float, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.overhead, self._device, self._clock = overhead, device, clock
        self.spent = 0.0  # seconds of all measurements
        self.last = 0.0  # of the last one
        self._began = clock()
        self._costs: dict[bool, float] = {}  # of the last measurement, with the check and without

    @property
    def training(self) -> float:
        """Seconds that were not spent on measurements."""
        return self._clock() - self._began - self.spent

    def allows(self, *, check: bool) -> bool:
        """Whether a measurement, with the check by a random start or without, may be made now."""
        return not self._costs or self.due(check=check) <= self.training

    def due(self, *, check: bool) -> float:
        """The training time from which on the next measurement may be made, in seconds; after the first one."""
        return (self.spent + self.expected(check=check)) / self.overhead

    def expected(self, *, check: bool) -> float:
        """What the next measurement is taken to cost, in seconds; after the first one."""
        return self._costs.get(check, max(self._costs.values()) * (1.0 if check else UNCHECKED))

    def now(self) -> float:
        """The present time, in seconds."""
        return self._clock()

    @contextmanager
    def measuring(self, *, check: bool) -> Iterator[None]:
        """Take the time of a measurement; a GPU's pending work is that of the training."""
        wait_for(self._device)
        began = self._clock()
        try:
            yield
        finally:
            wait_for(self._device)
            self.last = self._clock() - began
            self.spent += self.last
            self._costs[check] = self.last

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Take the time of writing a row, which counts as that of its measurement."""
        began = self._clock()
        try:
            yield
        finally:
            self.spent += self._clock() - began

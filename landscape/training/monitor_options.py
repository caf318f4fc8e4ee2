"""Options of the monitor of a training run; see `landscape.Monitor`."""

import math
from dataclasses import dataclass

from landscape.options import at_least, require


@dataclass(frozen=True)
class MonitorOptions:
    """How often to measure. Raises OptionError: a value is out of its range."""

    every: int = 100  # updates between two measurements
    overhead: float = 0.02  # share of the training time that they may take

    def __post_init__(self) -> None:
        at_least("monitor_every", self.every, 1)
        require(0 < self.overhead < math.inf, "monitor_overhead", self.overhead, "above 0")

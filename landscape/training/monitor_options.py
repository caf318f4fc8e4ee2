"""Options of the monitor of a training run; see `landscape.Monitor`."""

import math
from dataclasses import dataclass

from landscape.options import at_least, require


@dataclass(frozen=True)
class MonitorOptions:
    """How often to measure."""

    every: int = 100  # updates between two measurements
    overhead: float = 0.02  # share of the training time that they may take


def monitor_of(wanted: bool, every: int, overhead: float) -> MonitorOptions | None:
    """The options of `--monitor`; None without it. Raises OptionError: a value is out of its range."""
    at_least("monitor_every", every, 1)
    require(0 < overhead < math.inf, "monitor_overhead", overhead, "above 0")
    return MonitorOptions(every, overhead) if wanted else None

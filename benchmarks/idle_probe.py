"""A probe whose units only wait, to measure what an executor adds; in a file of its own for workers to import."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from landscape.probe import Plan, Probe, Quantity, Unit, Values


@dataclass(frozen=True)
class Idle(Probe):
    """So many units, each of which takes so many seconds."""

    name: ClassVar[str] = "idle"
    units: int = 1000
    seconds: float = 0.0
    label: str = ""

    def plan(self, subject: Any) -> Plan:
        return Plan(over={"unit": np.arange(self.units)}, quantities={"value": Quantity("number of the unit")})

    def measure(self, subject: Any, unit: Unit) -> Values:
        time.sleep(self.seconds)
        return {"value": float(unit.index[0])}

"""Hold a study: networks, what was measured of each, and what is left to measure.

A cell is a network and a measurement of it: a probe, or a probe in a setting. What the results file holds is not
measured again, see `results.run_key`, so that a study that was stopped goes on with the cells that are left.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import xarray as xr

from landscape.results.protocols import stored as options_of
from landscape.statistics.stored import ends_of

Cell: TypeAlias = tuple[Any, Any]  # names of a network and of a measurement
Results: TypeAlias = Mapping[Any, xr.Dataset]  # by cell
Stored: TypeAlias = Iterable[tuple[str, xr.Dataset]]  # groups of a results file
Number: TypeAlias = tuple[float, float, float]  # value, and the ends of its 95 % interval
Place: TypeAlias = Callable[[str, xr.Dataset], Cell | None]  # of a result, given its probe; None if it does not belong
Row: TypeAlias = dict[str, Any]
UNKNOWN: Number = (np.nan, np.nan, np.nan)


@dataclass
class Network:
    """A network, as it was built and loaded, with its results by measurement."""

    labels: list[str] = field(default_factory=list)
    configuration: Row = field(default_factory=dict)
    epoch: float = 0.0
    results: dict[Any, xr.Dataset] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What the labels of its results have in common."""
        alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*self.labels, strict=False))
        return "".join(letters[0] for letters in alike).rstrip(" -_.") or self.labels[0]

    def number(self, measurement: Any, quantity: str) -> Number:
        """A quantity of a result with its interval; NaN where there is none."""
        data = self.results.get(measurement)
        if data is None or quantity not in data:
            return UNKNOWN
        low, high = ends_of(data, quantity)
        return float(data[quantity]), float(low), float(high)


@dataclass
class Study:
    """Networks by name, with what was measured of them; and the argument that they differ in, of a sweep."""

    label: str = ""
    networks: dict[Any, Network] = field(default_factory=dict)
    argument: str = ""

    @property
    def values(self) -> list[str]:
        return list(dict.fromkeys(map(self.value, self.networks.values())))

    def value(self, network: Network) -> str:
        """The value of a network in words."""
        return in_words(network.configuration.get(self.argument))

    @classmethod
    def of(cls, stored: Stored, place: Place) -> "Study":
        """The results of a file that have a place in the study; of several in one place the last counts."""
        study = cls()
        for name, data in stored:
            if (cell := place(name.partition("/")[0], data)) is not None:
                epoch = float(data.attrs.get("epoch", 0.0))
                network = study.networks.setdefault(cell[0], Network([], options_of(data, "configuration"), epoch))
                network.labels.append(str(data.attrs.get("label", "")))
                network.results[cell[1]] = data
        return study

    @property
    def cells(self) -> dict[Cell, xr.Dataset]:
        return {(name, key): data for name, one in self.networks.items() for key, data in one.results.items()}


def in_words(value: Any) -> str:
    """A value as on the command line."""
    return "none" if value is None else ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def identity(data: xr.Dataset) -> str:
    """The digest of the weights that a result is of; its label where it has none."""
    return str(data.attrs.get("checkpoint_sha256", "")) or str(data.attrs.get("label", ""))


def members_of(data: xr.Dataset) -> int:
    """The number of dropout masks that a result was measured with."""
    return int(options_of(data, "spec").get("mc_dropout", 0))


def smoothed(data: xr.Dataset) -> bool:
    """Whether smoothing blocks were inserted into the network."""
    return bool(data.attrs.get("smoothing", ""))

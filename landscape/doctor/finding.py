"""What the doctor's rules read, a stored result, and what they return, findings."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import xarray as xr

from landscape.results.command_line import command_for
from landscape.results.protocols import side_by_side, stored

Severity: TypeAlias = Literal["wrong", "suspicious", "note"]
SEVERITIES: Sequence[Severity] = ("wrong", "suspicious", "note")  # the worst first
# Classes of data sets with a name, for results whose attributes do not say how many there are.
CLASSES: Mapping[str, int] = {"digits": 10, "cifar10": 10, "cifar100": 100}

MOST_SAMPLES = 50_000  # of a suggestion; beyond, all that there are


@dataclass(frozen=True)
class Finding:
    """Something wrong, suspicious or worth knowing about stored numbers."""

    rule: str  # name of the rule, stable for scripts
    severity: Severity
    groups: tuple[str, ...]  # the results that it is about
    text: str  # what was found, with numbers
    remedy: str  # what to do: a command where one does it


@dataclass(frozen=True)
class Result:
    """One stored result; arrays of unfinished units are masked to NaN by `values`."""

    file: Path
    group: str
    data: xr.Dataset

    @property
    def probe(self) -> str:
        """Name of the probe that measured it."""
        return self.group.partition("/")[0]

    @property
    def label(self) -> str:
        """Readable name of the checkpoint."""
        return str(self.data.attrs.get("label", ""))

    def attribute(self, name: str, default: Any = "") -> Any:
        """An attribute of the group, or the default."""
        return self.data.attrs.get(name, default)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the probe; empty where none are stored."""
        return stored(self.data, "parameters")

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The loading options; empty for an imported result."""
        return stored(self.data, "spec")

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What the network was built and trained with, as far as its checkpoint says."""
        return stored(self.data, "configuration")

    @cached_property
    def facts(self) -> Mapping[str, str]:
        """What must agree with other results of the same probe that stand beside it, in words."""
        return side_by_side(self.data)

    @property
    def classes(self) -> int:
        """Number of classes, as the data, their name or the checkpoint says; 0 where it is unknown."""
        stored, named = int(self.attribute("classes", 0)), CLASSES.get(str(self.attribute("data")), 0)
        return stored or named or int(self.configuration.get("classes") or 0)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.attribute("samples", 0))

    @property
    def complete(self) -> bool:
        """Whether every unit is finished."""
        return "done" not in self.data or bool((self.data.variables["done"].values == 1).all())

    def values(self, name: str) -> np.ndarray:
        """A stored array as float64, NaN where its unit is not finished; empty (0,) where it is not stored."""
        known = self.data.variables
        if name not in known or known[name].dtype.kind not in "fiub":
            return np.array([])
        values = known[name].values.astype(float)
        done = known.get("done")
        if done is not None and done.dims and known[name].dims[: done.ndim] == done.dims:
            finished = (done.values == 1).reshape(done.shape + (1,) * (values.ndim - done.ndim))
            values = np.where(finished, values, np.nan)
        return values

    def number(self, name: str) -> float:
        """A stored number without an axis; NaN where it is not stored."""
        values = self.values(name)
        return float(values) if values.shape == () else float("nan")

    def names(self, name: str) -> list[str]:
        """A stored array of text."""
        return [str(value) for value in self.data.variables[name].values.ravel()] if name in self.data else []

    def command(self, **changes: Any) -> str:
        """The command that measures it again with some options changed; "" where none does."""
        return command_for(self.data.attrs, self.file, **changes)


Rule: TypeAlias = Callable[[Result], Iterator[Finding]]  # of one result
RuleOfSeveral: TypeAlias = Callable[[Sequence[Result]], Iterator[Finding]]  # of all results of one probe, or of all


def look_at_inputs(result: Result) -> str:
    """The remedy for numbers that are nowhere finite."""
    return "check the inputs, and the weights: landscape evaluate " + (result.spec.get("checkpoint") or "CHECKPOINT")


def measure_again(result: Result, otherwise: str, **changes: Any) -> str:
    """`run: COMMAND` with the changed options, or words for a result that no command measures."""
    command = result.command(**changes)
    return f"run: {command}" if command else otherwise


def more_samples(result: Result, factor: float) -> str:
    """The command with as many samples as make an error `factor` times smaller, at least twice as many."""
    if str(result.spec.get("samples")) == "all":
        return "all samples are used already: there is nothing to tell apart here with these data"
    wanted = result.samples * max(2.0, factor * factor)  # may be infinite
    asked = str(math.ceil(wanted / 100) * 100) if wanted < MOST_SAMPLES else "all"
    return measure_again(result, f"use {asked} samples", samples=asked)


def found(rule: str, severity: Severity, results: Result | Sequence[Result], text: str, remedy: str) -> Finding:
    """A finding about one or several results."""
    results = [results] if isinstance(results, Result) else results
    return Finding(rule, severity, tuple(result.group for result in results), text, remedy)

"""The vocabulary of a measurement: what is measured, over which units, and how it is labelled.

A probe is a frozen dataclass whose fields are its parameters. `plan` says what will be measured, `measure` does
one independent unit of it, an optional `reduce` derives summaries from stored numbers alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

Values: TypeAlias = Mapping[str, Any]  # quantity name -> number or array without the unit axes


@dataclass(frozen=True)
class Quantity:
    """One stored array.

    Args:
        long_name: what it is, for axes and tables.
        units: physical units; "1" for pure numbers.
        dims: names of its axes. For measured quantities these FOLLOW the unit axes; for labels and summaries
            they are all its axes.
        dtype: numpy dtype of the stored array; unfinished values are NaN, so measured numbers are floats.
    """

    long_name: str
    units: str = "1"
    dims: tuple[str, ...] = ()
    dtype: str = "float64"


@dataclass(frozen=True)
class Unit:
    """One independent piece of work: a position on the unit axes and the coordinates found there."""

    index: tuple[int, ...]
    at: Mapping[str, Any]

    def seed(self, seed: int) -> int:
        """A 63-bit seed that belongs to this unit alone, the same on every machine and in every order."""
        return derived_seed(seed, *self.index)


def derived_seed(seed: int, *keys: int | str) -> int:
    """A 63-bit seed from a base seed and any keys, by SHA-256: independent of order, process and platform."""
    text = "/".join(str(key) for key in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Plan:
    """What a probe will measure on one subject.

    Args:
        over: the unit axes, name -> coordinate values; units are their product, in C order.
        quantities: what `measure` returns for every unit.
        axes: further axes, name -> coordinate values.
        labels: arrays known before any measurement (names, kinds, depths): name -> (Quantity, values).
        summaries: what `reduce` fills in from the stored numbers.
        about: what the axes are, name -> Quantity (long name and units).
        facts: short facts that belong to the result, stored as attributes of the group.
    """

    over: Mapping[str, np.ndarray]
    quantities: Mapping[str, Quantity]
    axes: Mapping[str, np.ndarray] = field(default_factory=dict)
    labels: Mapping[str, tuple[Quantity, np.ndarray]] = field(default_factory=dict)
    summaries: Mapping[str, Quantity] = field(default_factory=dict)
    about: Mapping[str, Quantity] = field(default_factory=dict)
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of units along each unit axis."""
        return tuple(len(values) for values in self.over.values())

    def unit(self, index: tuple[int, ...]) -> Unit:
        """The unit at a position."""
        at = {name: values[i] for (name, values), i in zip(self.over.items(), index, strict=True)}
        return Unit(tuple(int(i) for i in index), at)

    def units(self) -> Iterator[Unit]:
        """Every unit, last axis fastest."""
        for index in itertools.product(*(range(n) for n in self.shape)):
            yield self.unit(index)

    def axis(self, name: str) -> np.ndarray:
        """Coordinate values of a unit axis or a further axis."""
        return self.over[name] if name in self.over else self.axes[name]


@dataclass(frozen=True)
class Stage:
    """What to measure next, where a probe decides that from what is known.

    Args:
        indices: of the units to measure now.
        derived: with nothing left to measure, the quantities of every unit; those not done are taken from it.
    """

    indices: Sequence[tuple[int, ...]]
    derived: Mapping[str, np.ndarray]


@runtime_checkable
class Probe(Protocol):
    """What every probe offers. Probes keep no state, open no files and never print.

    Optional methods: `sweep(subject, units) -> Iterator[Values]` measures several units with shared set-up,
    yielding one result per unit in order; `reduce(arrays) -> Values` computes the plan's summaries from a dict
    of stored arrays (axes, labels, quantities, `done`). A third, `identity(subject)`, replaces the parameters in the
    digest of the question where they name files. `stage(arrays) -> Stage | None` measures in stages: it has to follow
    from stored arrays alone, so that a stopped run goes on as it would have; None measures all units at once.
    `trial(subject) -> choices` makes choices that depend on the machine, stored and used again; `settled(subject,
    choices)` gives probe and subject with them. `estimate(subject, units, workers)` says in words how long units take.

    `uses` names the fields of the subject's `Spec` that can change this probe's numbers beyond weights and data:
    they enter the digest of the question.
    """

    name: ClassVar[str]
    uses: ClassVar[tuple[str, ...]]

    def plan(self, subject: Any) -> Plan: ...

    def measure(self, subject: Any, unit: Unit) -> Values: ...


class Sweeping(Protocol):
    """What measures several units with shared set-up."""

    def sweep(self, subject: Any, units: Iterable[Unit]) -> Iterator[Values]: ...


def sweep(probe: Probe | Sweeping, subject: Any, units: Iterable[Unit]) -> Iterator[Values]:
    """Measure units one by one, or together where the probe knows a faster way."""
    together = getattr(probe, "sweep", None)
    if together is not None:
        yield from together(subject, units)
    else:
        assert isinstance(probe, Probe)
        for unit in units:
            yield probe.measure(subject, unit)

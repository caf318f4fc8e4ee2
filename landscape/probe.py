"""Define the contract of a probe: what it plans, what it measures, and its optional capabilities.

A probe is a frozen dataclass whose fields are its parameters. `plan` says what will be measured, `measure` measures
one independent unit of it. Everything else is optional; each capability is a Protocol below.
"""

import contextlib
import difflib
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from landscape.headline import Headline, with_errors
from landscape.headline import Quantity as Quantity
from landscape.options import plain_value

Values: TypeAlias = Mapping[str, Any]  # quantity name -> number or array without the unit axes
AXES = {"batch": "mini-batch"}  # long names of axes; that of others is their name


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
    """What a probe will measure on one subject; everything by name."""

    over: Mapping[str, np.ndarray]  # coordinate values of the unit axes; units are their product, in C order
    quantities: Mapping[str, Quantity]  # what `measure` returns for every unit
    axes: Mapping[str, np.ndarray] = field(default_factory=dict)  # coordinate values of further axes
    labels: Mapping[str, tuple[Quantity, np.ndarray]] = field(default_factory=dict)  # known before any measurement
    summaries: Mapping[str, Quantity] = field(default_factory=dict)  # what `reduce` computes from stored numbers
    about: Mapping[str, Quantity] = field(default_factory=dict)  # long names and units of axes, unless those of AXES
    facts: Mapping[str, str | int | float] = field(default_factory=dict)  # stored as attributes of the group
    # The one unit axis gets its coordinates while it is measured, see `results.series`; `over` holds those so far.
    grows: bool = False

    def __post_init__(self) -> None:
        for table in ("quantities", "summaries"):
            object.__setattr__(self, table, with_errors(getattr(self, table)))

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
        return map(self.unit, np.ndindex(self.shape))

    def axis(self, name: str) -> np.ndarray:
        """Coordinate values of a unit axis or a further axis."""
        if name not in (axes := {**self.axes, **self.over}):
            raise ValueError(f"the plan has a quantity over {name}, and no such axis; it has {', '.join(axes)}")
        return axes[name]


@dataclass(frozen=True)
class Shard:
    """Every `of`-th unit of a plan, from the `number`-th on: the same in every process, whatever is finished."""

    number: int = 1
    of: int = 1

    def part(self, plan: Plan, units: Sequence[Unit]) -> list[Unit]:
        """The units that belong to this shard, in order; neighbours, which often cost alike, are in different ones."""
        positions = [int(np.ravel_multi_index(unit.index, plan.shape)) for unit in units]
        return [unit for unit, at in zip(units, positions, strict=True) if at % self.of == self.number - 1]

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Shard()


@dataclass(frozen=True)
class Stage:
    """What to measure next, where a probe decides that from what is known."""

    indices: Sequence[tuple[int, ...]]  # of the units to measure now
    derived: Mapping[str, np.ndarray]  # with nothing left to measure: quantities of every unit, for those not done


def make_texts(probe: Any, *names: str) -> None:
    """Make texts such as `1,2` of options that Python callers may give as numbers, or as lists."""
    for name in names:
        object.__setattr__(probe, name, plain_value(name, getattr(probe, name), getattr(type(probe), name)))


class NotApplicable(ValueError):
    """The network has nothing of what the probe measures, such as self-attention."""


@runtime_checkable
class Probe(Protocol):
    """What every probe offers. Probes keep no state, open no files and never print.

    A probe inherits the class variables below, sets those that differ and defines `name`, `plan` and `measure`,
    or instead of the last one `sweep` or `hooks`.
    """

    name: ClassVar[str]  # of the command and of the groups in the results file
    api: ClassVar[int] = 1  # version of this interface, `plugins.API`; a probe of another package says its own
    # Fields of the subject's `Spec` that can change the numbers beyond weights and data: part of the run key's digest.
    uses: ClassVar[tuple[str, ...]] = ()
    split: ClassVar[str] = "test"  # of the data, unless the user asks for another
    batch_size: ClassVar[int] = 128  # likewise
    # whether the model's outputs matter; False, also of one probe by its options, accepts those without a classifier
    logits: ClassVar[bool] = True
    deterministic: ClassVar[bool] = True  # whether two passes of the model must be equal
    differentiates: ClassVar[bool] = False  # whether numbers are of second derivatives, which are checked first
    by_process_group: ClassVar[bool] = False  # whether the processes of `torchrun` can share every product
    ordered: ClassVar[bool] = False  # whether the samples keep the order of their source, such as frames of a stream
    # Several checkpoints of its command: `each` has a result, or they have one: a `run`, the `ends` of a line, a
    # `pair` or `members`.
    several: ClassVar[str] = "each"
    places: ClassVar[Mapping[str, Sequence[str]]] = {}  # options that are paths, and words that they may be instead
    checkpoints: ClassVar[str] = (
        "checkpoints, or folders of them; a run's folder means its last one"  # this in the help
    )
    staged_by: ClassVar[str] = ""  # the option that makes it decide by stages, see `Stages`
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"park2022": {}}  # parameters and loading options, by name
    smallest: ClassVar[Mapping[str, Any]] = {}  # parameters for the fastest meaningful run, used by tests
    errors_over: ClassVar[str] = "samples"  # what the errors of its headline numbers are over, in words
    # Fewest values, by what they are, with which the coverage of its intervals was measured; others: `CERTIFIED`.
    certified: ClassVar[Mapping[str, int]] = {}
    headlines: ClassVar[Sequence[Headline]] = ()  # numbers that sum up a result; without, all without an axis
    # What a probe that has no such option answers.
    seed: int | None = None  # of what it draws; a result says it where it is not the subject's
    params: str = ""  # regular expression of the parameters that it is restricted to
    layers: tuple[str, ...] | None = None  # those of the layers that it measures; () for all

    @property
    def whole(self) -> bool:
        """Whether every unit is of all samples, so that the processes of `torchrun` can share it."""
        return True

    def plan(self, subject: Any) -> Plan: ...

    def measure(self, subject: Any, unit: Unit) -> Values:
        """One unit; of a probe that `Sweeps`, a sweep of one, and of one that `SharesPass`, by its hooks alone."""
        if isinstance(self, SharesPass):
            return cast(Values, self.hooks(subject, unit.index).run(subject, unit.index))
        (values,) = cast(Sweeps, self).sweep(subject, [unit])
        return values

    def variants(self) -> Sequence[Any]:
        """The runs that it stands for, each with its own group, such as random planes with several seeds."""
        return [self]

    def resolved(self, subject: Any, choices: Mapping[str, Any]) -> tuple[Any, Any]:
        """Probe and subject with the choices of `autotune` applied, as if they had been given as options."""
        return replace(cast(Any, self), **choices), subject


@runtime_checkable
class Sweeps(Protocol):
    """Measures several units with shared set-up: one result per unit, in order."""

    def sweep(self, subject: Any, units: Sequence[Unit]) -> Iterator[Values]: ...


@runtime_checkable
class Reduces(Protocol):
    """Computes the plan's summaries from stored arrays alone (axes, labels, quantities, `done`)."""

    def reduce(self, data: Mapping[str, np.ndarray]) -> Values: ...


@runtime_checkable
class Identifies(Protocol):
    """Says what stands for options in the run key: contents for paths, numbers for texts, None where one cannot matter.

    Of the others, those that differ from their defaults are in it.
    """

    def identity(self, subject: Any) -> Mapping[str, Any]: ...


@runtime_checkable
class Stages(Protocol):
    """Decides from the stored arrays what to measure next, so that a stopped run goes on as it would have.

    None measures all units at once.
    """

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage | None: ...


@runtime_checkable
class Autotunes(Protocol):
    """Makes choices that depend on the machine; they are stored with the result and used again when it resumes.

    `autotune` makes them (empty: nothing to choose), and `Probe.resolved` applies them.
    """

    def autotune(self, subject: Any) -> Mapping[str, Any]: ...


@runtime_checkable
class Estimates(Protocol):
    """Forecasts its units before the first: their seconds, and these in words with options for a shorter run."""

    def estimate(self, subject: Any, units: int, workers: int = 1) -> tuple[float, str]: ...


@runtime_checkable
class SharesPass(Protocol):
    """Measures a unit, a mini-batch or a member on one, with hooks on its forward pass, which several probes share."""

    def hooks(self, subject: Any, index: tuple[int, ...]) -> Any: ...


@runtime_checkable
class Saves(Protocol):
    """Makes a network, which `--save` writes as a checkpoint; returns what the file holds, in words."""

    def save(self, subject: Any, path: Any) -> str: ...


CAPABILITIES: tuple[type, ...] = (Sweeps, Reduces, Identifies, Stages, Autotunes, Estimates, SharesPass, Saves)


def checked(kind: type[Any]) -> type[Any]:
    """The class of a probe, after checking it against the contract above.

    Raises:
        TypeError: it is not a frozen dataclass, lacks a part of the contract, or defines a public method outside it;
            names the method, what was expected, and the nearest name.
    """
    if Probe not in kind.__mro__ or not is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{kind.__name__} is not a probe; expected a frozen dataclass that inherits Probe")
    if not isinstance(getattr(kind, "name", None), str):
        raise TypeError(f"{kind.__name__} has no name; expected a class variable `name`")
    for parameter in fields(kind):
        name = parameter.name
        owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        if name in vars(Probe) and name not in vars(owner) and parameter.default is not MISSING:
            raise TypeError(f"{kind.__name__}.{name} has no default of its own, and Probe has one; give it one")
    contract = {name: method for part in (Probe, *CAPABILITIES) for name, method in _methods(part).items()}
    own = {
        name: f for base in reversed(kind.__mro__) if Probe in base.__mro__[1:] for name, f in _methods(base).items()
    }
    for name, method in own.items():
        if name not in contract:
            near = difflib.get_close_matches(name, contract, 1)
            hint = f"; did you mean {near[0]}?" if near else "; helpers start with an underscore"
            raise TypeError(f"{kind.__name__}.{name} is not a method of a probe, expected {', '.join(contract)}{hint}")
        got, wanted = (list(inspect.signature(f).parameters) for f in (method, contract[name]))
        if got != wanted:
            raise TypeError(f"{kind.__name__}.{name} takes ({', '.join(got)}), expected ({', '.join(wanted)})")
    if lacking := [ways[0] for ways in (("plan",), ("measure", "sweep", "hooks")) if not {*ways} & own.keys()]:
        raise TypeError(f"{kind.__name__} lacks {', '.join(lacking)} of Probe")
    return kind


def _methods(kind: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}


class Listener(Protocol):
    """Hears of a run's work while it is done, such as a progress bar."""

    def units(self, finished: int, total: int) -> None: ...  # before the first of a run

    def products(self, made: int, per_unit: int) -> None: ...  # Hessian products of mini-batches, see `report_products`

    def workers(self, count: int) -> None: ...  # that measure, whenever one is started or dies


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of the work that is done in this thread while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_units(finished: int, total: int) -> None:
    """Say how many units a run has, and how many of them are finished before it."""
    if (listener := _listener.get()) is not None:
        listener.units(finished, total)


def report_products(made: int = 0, *, per_unit: int = 0) -> None:
    """Say that products were made, or, before a sweep of units, how many are expected in each."""
    if (listener := _listener.get()) is not None:
        listener.products(made, per_unit)


MICRO_BATCHES = "micro_batches"  # stands beside the values of a unit whose mini-batches did not fit into memory
_micro_batches: ContextVar[list[int] | None] = ContextVar("micro_batches", default=None)


def report_micro_batches(count: int) -> None:
    """Say that a mini-batch was computed in so many parts, because it did not fit into memory."""
    if (found := _micro_batches.get()) is not None:
        found.append(count)


def noting_micro_batches(found: list[int]) -> None:
    """Append to a list what `report_micro_batches` says from now on in this context, and in threads with a copy."""
    _micro_batches.set(found)


def report_workers(count: int) -> None:
    """Say how many workers measure."""
    if (listener := _listener.get()) is not None:
        listener.workers(count)


def sweep(probe: Any, subject: Any, units: Sequence[Unit]) -> Iterator[Values]:
    """Measure units one by one, or with shared set-up where the probe knows how."""
    if isinstance(probe, Sweeps):
        return probe.sweep(subject, units)
    return (probe.measure(subject, unit) for unit in units)

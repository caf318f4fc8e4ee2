"""The table of checkpoints: numbers with their 95 % intervals, one column per number and protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr

from landscape.plots import headlines
from landscape.plots.report import protocols
from landscape.plots.surface import HEIGHT_RADIUS
from landscape.results import reader
from landscape.results.protocols import samples_of

QUANTILE = 1.96  # standard errors of a 95 % interval
MOST = 100.0  # of the logarithm of the ends of an interval: more are not worth writing


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95 % interval, NaN where it has none, and where it was found."""

    value: float
    low: float = math.nan
    high: float = math.nan
    at: str = ""
    se: float = math.nan  # of an interval that is not the value and 1.96 standard errors

    @property
    def error(self) -> float:
        """The standard error behind the interval."""
        return self.se if math.isfinite(self.se) else (self.high - self.low) / (2 * QUANTILE)

    def __str__(self) -> str:
        text = f"{self.value:.4g}"
        known = math.isfinite(self.low) and math.isfinite(self.high)
        low, high = (f"{end:.0f}" if 1000 <= abs(end) < 1e6 else f"{end:.3g}" for end in (self.low, self.high))
        text += f" [{low}, {high}]" if known else ""
        return f"{text} {self.at}".strip()


Getter = Callable[[xr.Dataset], Estimate | None]


def with_error(value: float, error: float, at: str = "") -> Estimate | None:
    """An estimate from a standard error; None without a finite value."""
    if not math.isfinite(value):
        return None
    return Estimate(value, value - QUANTILE * error, value + QUANTILE * error, at)


def above_zero(value: float, error: float) -> Estimate | None:
    """An estimate of a positive mean, with its interval on the logarithm: value exp(+-1.96 error / value).

    The delta method gives log(value) the standard error error / value. Values near 0 with errors as large have skewed
    samples, for which an interval of equal arms reaches below 0.
    """
    if not (math.isfinite(error) and value > 0):
        return with_error(value, error)
    factor = math.exp(min(QUANTILE * error / value, MOST))
    return Estimate(value, value / factor, value * factor, se=error)


def scalar(name: str) -> Getter:
    """Reads a stored number, with its stored interval or standard error."""

    def get(data: xr.Dataset) -> Estimate | None:
        if name not in data or data[name].ndim:
            return None
        value, low, high, error = (float(data.get(f"{name}{end}", math.nan)) for end in ("", "_low", "_high", "_se"))
        if math.isfinite(low) and math.isfinite(high):
            return Estimate(value, low, high) if math.isfinite(value) else None
        return with_error(value, error)

    return get


def share(value: float, samples: object) -> Estimate | None:
    """A share of right answers with its Wilson interval."""
    try:
        n = float(str(samples))
    except ValueError:
        n = math.nan
    if not math.isfinite(value):
        return None
    if not n > 0 or not 0 <= value <= 1:
        return Estimate(value)
    spread = QUANTILE * math.sqrt(value * (1 - value) / n + QUANTILE**2 / (4 * n * n))
    centre, scale = value + QUANTILE**2 / (2 * n), 1 + QUANTILE**2 / n
    return Estimate(value, (centre - spread) / scale, (centre + spread) / scale)


def _intact(data: xr.Dataset) -> Estimate | None:
    return share(float(data.attrs.get("intact_accuracy", math.nan)), data.attrs.get("samples", ""))


def _centre(name: str) -> Getter:
    def get(data: xr.Dataset) -> Estimate | None:
        found = headlines.numbers(data).get(name, math.nan)
        if name == "accuracy":
            return share(float(found), data.attrs.get("samples", ""))
        at = {axis: np.flatnonzero(np.abs(data[axis].values) < 1e-9)[:1] for axis in ("x", "y") if axis in data}
        known = "loss_se" in data and len(at) == 2 and all(place.size for place in at.values())
        error = data["loss_se"].isel(at).item() if known else math.nan
        positive = "loss" in data and data["loss"].attrs.get("units") == "nats"  # a loss of one's own may be negative
        return (above_zero if positive else with_error)(float(found), error)

    return get


def height(data: xr.Dataset, radius: float = HEIGHT_RADIUS) -> Estimate | None:
    """The mean rise of the loss at a radius of the surface."""
    if "height" not in data or radius not in data["radius"]:
        return None
    at = data.sel(radius=radius)
    return with_error(at["height"].item(), at["height_se"].item() if "height_se" in at else math.nan)


def _layer(name: str, position: int) -> Getter:
    def get(data: xr.Dataset) -> Estimate | None:
        known = np.flatnonzero(np.isfinite(data[name].values)) if name in data else np.array([], int)
        if not known.size:
            return None
        errors = data[f"{name}_se"].values if f"{name}_se" in data else np.full(data[name].size, math.nan)
        i = known[position]
        return with_error(float(data[name].values[i]), float(errors[i]))

    return get


def worst(axis: str, label: str) -> Getter:
    """The largest accuracy drop, or loss increase, with its place on an axis."""

    def get(data: xr.Dataset) -> Estimate | None:
        quantity = headlines.change(data)
        if quantity not in data or not np.isfinite(data[quantity].values).any():
            return None
        i = int(np.nanargmax(np.where(np.isfinite(data[quantity].values), data[quantity].values, -np.inf)))
        name = data[axis].values[i]
        words = f"at {name}" if isinstance(name, str) else f"at {name:g} {label}"
        return with_error(float(data[quantity].values[i]), float(data[f"{quantity}_se"].values[i]), words)

    return get


@dataclass(frozen=True)
class Number:
    """A number of the table: of which probe, under which heading, what it is, and how it is read."""

    probe: str
    title: str
    definition: str
    get: Getter


NUMBERS: Sequence[Number] = (
    Number("calibration", "accuracy", "share of right classes", scalar("accuracy")),
    Number("lesion", "accuracy", "share of right classes of the intact network", _intact),
    Number("sensitivity", "accuracy", "share of right classes of the intact network", _intact),
    Number("surface", "accuracy", "share of right classes at the centre of the surface", _centre("accuracy")),
    Number("surface", "loss", "loss at the centre of the surface, in its units; cross-entropy has its 95 % interval on "
           "a logarithmic scale, as it is positive", _centre("loss")),
    Number("calibration", "ECE", "expected calibration error", scalar("ece")),
    Number("hessian", "NEP", "share of negative eigenvalues among the largest by magnitude", scalar("nep")),
    Number("hessian", "APE", "mean of the positive eigenvalues among the largest by magnitude", scalar("ape")),
    Number("trace", "trace", "sum of all Hessian eigenvalues", scalar("trace")),
    Number("surface", "height", f"mean rise of the loss on a circle of radius {HEIGHT_RADIUS:g} (filter norm)", height),
    Number(
        "fourier", "high freq. first", "relative log amplitude at the highest frequency, first layer",
        _layer("high_frequency", 0),
    ),
    Number(
        "fourier", "high freq. last", "relative log amplitude at the highest frequency, last layer",
        _layer("high_frequency", -1),
    ),
    Number("lesion", "largest drop", "largest accuracy drop, or loss increase, when one unit is removed",
           worst("name", "")),
    Number("noise", "noise drop", "largest accuracy drop, or loss increase, under noise of one band of frequencies",
           worst("band", "π")),
    Number("probe-linear", "linear probe", "accuracy of a linear classifier on the last layer", _layer("accuracy", -1)),
    Number("corruption", "corrupted", "accuracy under common corruptions, mean", scalar("mean_accuracy")),
    Number("shape-bias", "shape bias", "shape decisions among shape and texture decisions", scalar("shape_bias")),
)  # fmt: skip


@dataclass
class Column:
    """One number under one protocol."""

    number: Number
    protocol: int
    example: xr.Dataset  # whose attributes and commands stand for the column
    distinct: str = ""  # in what it differs from other columns of the same number
    cells: dict[str, Estimate] = field(default_factory=dict)  # by checkpoint
    partial: dict[str, str] = field(default_factory=dict)  # by checkpoint, how much of its result is there

    @property
    def samples(self) -> str:
        """How many samples of which split the numbers are of: `360 test`."""
        return samples_of(self.example)


@dataclass
class Table:
    """Checkpoints, with their model, and columns."""

    checkpoints: dict[str, str]
    columns: list[Column]


def checkpoints(stored: Sequence[tuple[str, xr.Dataset]]) -> list[str]:
    """The name of every result's checkpoint: its label, with a part of the digest where several share the label."""
    digests: dict[str, set[str]] = {}
    for _, data in stored:
        digests.setdefault(_label(data), set()).add(_digest(data))
    several = {label for label, found in digests.items() if len(found - {""}) > 1}
    return [f"{_label(d)} ({_digest(d)[:6]})" if _label(d) in several and _digest(d) else _label(d) for _, d in stored]


def comparison(stored: Sequence[tuple[str, xr.Dataset]], numbered: protocols.Protocols | None = None) -> Table:
    """The table of a study, checkpoints in its order; the newest of several results of one protocol counts.

    Numbers of different protocols, or of other parameters, are in columns of their own. Accuracy is that of the first
    probe that has one for a checkpoint.
    """
    ordered = reader.by_checkpoint(list(stored))
    names = checkpoints(ordered)
    table = Table({}, [])
    for name, (_, data) in zip(names, ordered, strict=True):
        table.checkpoints[name] = table.checkpoints.get(name) or str(data.attrs.get("model", ""))
    known: set[str] = set()  # checkpoints with an accuracy
    for number in NUMBERS:
        columns: dict[tuple[str, str], Column] = {}
        for name, (group, data) in zip(names, ordered, strict=True):
            estimate = number.get(data) if group.partition("/")[0] == number.probe else None
            if estimate is None or (number.title == "accuracy" and name in known):
                continue
            key = protocols.key_of(data)
            if key not in columns:
                columns[key] = Column(number, (numbered or protocols.Protocols()).number(data), data)
            columns[key].cells[name] = estimate
            columns[key].partial.pop(name, None)
            if "done" in data and (units := int(data["done"].size)) > (there := reader.finished_units(data)):
                columns[key].partial[name] = f"{there:,} of {units:,} units"
        if number.title == "accuracy":
            known |= {name for column in columns.values() for name in column.cells}
        table.columns += columns.values()
    for column in table.columns:
        alike = [other.example for other in table.columns if other.number.title == column.number.title]
        column.distinct = protocols.distinctions(alike, column.example)
    measured = {name for column in table.columns for name in column.cells}
    table.checkpoints = {name: model for name, model in table.checkpoints.items() if name in measured}
    return table


def _label(data: xr.Dataset) -> str:
    return str(data.attrs.get("label", ""))


def _digest(data: xr.Dataset) -> str:
    return str(data.attrs.get("checkpoint_sha256", ""))


def summary_table(path: Path | str) -> list[dict[str, str]]:
    """One row per number of `comparison`, for a terminal: the samples it is of, and its interval for every checkpoint.

    Empty text stands where a checkpoint was not measured.
    """
    with reader.streaming(path) as stored:
        table = comparison([(name, data) for name, data in stored if not name.startswith("compare/")])
    found = []
    for column in table.columns:
        title = f"{column.number.title} ({column.distinct})" if column.distinct else column.number.title
        cells = {name: str(column.cells[name]) if name in column.cells else "" for name in table.checkpoints}
        found.append({"number": title, "samples": column.samples, **cells})
    return found

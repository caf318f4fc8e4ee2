"""Draw measures of flatness of several networks, each relative to the first one, with intervals."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.headline import FLATTER, FLATTER_ABOVE
from landscape.plots import broken, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.headline_numbers import Measured, each
from landscape.statistics import flatness, rounding, seed_groups
from landscape.statistics.paired import Difference, paired_t

MEANING = (
    "How much the loss around the weights rises or curves, by many measures, each relative to the first network: right "
    "is sharper (the PAC-Bayes sigma, larger where the loss is flatter, is drawn as its inverse). Most measures change "
    "when weights are rescaled without changing the function, and they often do not correlate with generalisation: a "
    "flatter network need not be the better one."
)
NOTE = (
    "Bars: 95 % intervals by the error of the network's own number. Right: the first network's value with its own. "
    "Arrows at the left edge: not above 0."
)
OF_SAMPLES = 6  # mini-batches from which measures are paired whose own errors are over all samples
ROW = 0.17  # inches of a measure, and of each further network in it
BESIDE = 0.7  # share of a row over which networks are drawn
LEAST = 1e-3  # lower end of an interval, as a share of its value, where it is not above 0: the axis has no 0


def rows_of(data: xr.Dataset) -> Iterator[Measured]:
    """The measures of a result, in the order of its table."""
    for one, flatter in zip(each(data, "{measure_name}", "value", "measure"), data["flatter"].values, strict=True):
        yield replace(one, reading=FLATTER_ABOVE if flatter == "higher" else FLATTER)


def draw(data: xr.Dataset, ax: Axes, *, look: Look, first: xr.Dataset | None = None, shift: float = 0.0) -> Axes:
    """Draw every measure over that of the `first` result, by default of this one, in a row each, sharper to the right.

    A measure that the first result lacks, or that is not above 0 there, has no ratio and is left out.
    """
    reference = {row.name: row.value for row in rows_of(data if first is None else first)}
    places = {name: float(k) for k, name in enumerate(reference)}
    found = [row for row in rows_of(data) if row.name in reference and reference[row.name] > 0]
    ratios = np.array([_relative(row, reference) for row in found]).reshape(-1, 3)
    at = np.array([places[row.name] + shift for row in found])
    value, low, high = ratios.T
    drawn = np.isfinite(value) & (value > 0)
    ax.errorbar(
        value[drawn], at[drawn], xerr=broken.bars(value, low, high)[:, drawn], color=look.color, marker=look.marker,
        linestyle="none", markersize=4, elinewidth=0.9, label=look.label,
    )  # fmt: skip
    broken.mark(ax, at, np.where(np.isfinite(value) & ~drawn, np.nan, value), np.stack([low, high]), flat=True)
    below = at[np.isfinite(value) & ~drawn]
    if below.size:
        ax.plot(np.zeros_like(below), below, "<", color=look.color, transform=ax.get_yaxis_transform(), clip_on=False)
    ax.axvline(1.0, color=theme.muted(), linewidth=0.5, zorder=0)
    ax.set(xscale="log", xlabel="relative to the first network (right: sharper)", ylim=(len(places) - 0.5, -0.5))
    ax.set_yticks(list(places.values()), list(places))
    ax.tick_params(axis="y", length=0)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results in the rows of the first one's measures, whose values stand at the right."""
    from matplotlib.ticker import LogLocator, NullFormatter

    first = list(rows_of(results[0]))
    height = 0.7 + len(first) * (ROW + 0.05 * len(results))
    figure = style.page(results, looks, height=height, legend=looks, note=NOTE)
    ax = figure.subplots()
    for i, (data, look) in enumerate(zip(results, looks, strict=True)):
        draw(data, ax, look=look, first=results[0], shift=BESIDE * ((i + 0.5) / len(results) - 0.5))
    for k, row in enumerate(first):
        ax.text(1.01, k, _number(row), transform=ax.get_yaxis_transform(), va="center", fontsize=6, color=theme.muted())
        if k % 2:
            ax.axhspan(k - 0.5, k + 0.5, color="0.5", alpha=0.12, linewidth=0, zorder=0)
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(high, 1.25))
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    return figure


def _relative(row: Measured, reference: Mapping[str, float]) -> tuple[float, float, float]:
    """A measure over that of the reference, sharper to the right, with the ends of its interval."""
    unit = reference[row.name]
    value, low, high = (end / unit for end in (row.value, row.low, row.high))
    low = max(low, LEAST * value) if value > 0 else low
    return (1 / value, 1 / high, 1 / low) if row.reading == FLATTER_ABOVE and value > 0 else (value, low, high)


def _number(row: Measured) -> str:
    units = {"loss per squared weight": "", "nats per squared weight": ""}.get(row.unit, f" {row.unit}")
    return f"{rounding.plus_minus(row.value, row.high - row.value)}{units}"


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Of every measure over mini-batches of the same samples, or over random vectors, which are the same too.

    Of few pairs the interval by Student's t is wider than that by the errors of both where these are over samples.
    """
    mine, theirs = (_parts(one) for one in (data, other))
    alike = data.attrs.get("batch_size") == other.attrs.get("batch_size")
    return {
        name: paired_t(one.values, theirs[name].values, one.of, one.shares)
        for name, one in mine.items()
        if name in theirs
        and _fewest(name) <= len(one.values)
        and np.array_equal(one.numbers, theirs[name].numbers)
        and (alike or one.of != "mini-batches")
    }


def unpaired(name: str, data: xr.Dataset, other: xr.Dataset) -> Difference | str:
    """Why a measure of two results is not paired."""
    over = flatness.MEASURES[name].over
    if over == "noise draws":
        return "its noise draws are not stored one by one"
    if over == "residual":
        return "its error is that of the search"
    sha256 = data.attrs.get("data_sha256")
    if not sha256 or sha256 != other.attrs.get("data_sha256"):
        return "the samples are not known to be the same"
    if over != "random vectors" and data.attrs.get("batch_size") != other.attrs.get("batch_size"):
        return "mini-batches of different sizes"
    counts = [len(one[name].values) if name in one else 1 for one in map(_parts, (data, other))]
    units = "random vectors" if over == "random vectors" else "mini-batches"
    if min(counts) < _fewest(name):
        return f"fewer than {_fewest(name)} {units}"
    return f"different numbers of {units}" if counts[0] != counts[1] else f"different {units}"


def _fewest(name: str) -> int:
    """How many pairs a difference is tested by, at least."""
    return OF_SAMPLES if flatness.MEASURES[name].over == "samples" else seed_groups.FEWEST


def _parts(data: xr.Dataset) -> dict[str, flatness.Parts]:
    return flatness.parts({str(name): data[name].values for name in data.variables})


def table(results: Sequence[xr.Dataset]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per measure and result, with its error, definition and invariances."""
    names = {
        "measure": "measure_name", "value": "value", "error": "se", "units": "measure_units", "rho": "rho",
        "error over": "error_over", "rescaling": "invariant_rescaling", "logit scale": "invariant_logit_scale",
        "permutation": "invariant_permutation",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    definitions: dict[str, str] = {}
    for data in results:
        network = {"network": str(data.attrs["label"])} if len(results) > 1 else {}
        columns = (data[stored].values.tolist() for stored in names.values())
        rows += [network | dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        definitions |= zip(data["measure_name"].values.tolist(), data["definition"].values.tolist(), strict=True)
    what = "Rescaling, logit scale, permutation: is the value the same for the same function with other weights?"
    return rows, [what, *(f"{name}: {definition}" for name, definition in definitions.items())]

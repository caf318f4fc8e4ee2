"""Draw accuracies over the weight of the contrastive objective, with linear probes of measured encoders beside them."""

from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, style, theme
from landscape.plots.appearance import LINES, OTHERS, escaped, looks
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.protocols import stored
from landscape.statistics.stored import ends_of
from landscape.studies import kinds
from landscape.studies.study import Study

MEANING = (
    "Encoders trained with (1 - weight) x masked-image loss + weight x contrastive loss: imported accuracies over the "
    "weight, and the accuracy of a linear probe of the last layer of every encoder that was measured here. Imported "
    "numbers are of other networks and data, so that only the shapes of the curves compare."
)
WEIGHTS = {"mim": 0.0, "simclr": 1.0}  # of our own objectives
ACCURACY = "_accuracy"
studies = kinds.hybrid


def page(study: Study) -> Figure:
    """All accuracies in one panel."""
    imported, measured = (
        [data for (_, probe), data in study.cells.items() if probe == wanted] for wanted in ("hybrid", "probe-linear")
    )
    shown = looks(measured)
    tables = [escaped(str(data.attrs.get("label", ""))) for data in imported]
    names = list(dict.fromkeys(name for data in imported for name in columns(data)))
    taken = {look.color for look in shown}
    free = [other for other in OTHERS if other[0] not in taken] or OTHERS
    colors = [free[i % len(free)] for i in range(len(tables))]
    legend = [
        Look(f"{label}: {in_words(name)}", color, marker, LINES[names.index(name) % len(LINES)])
        for label, (color, marker), data in zip(tables, colors, imported, strict=True) for name in columns(data)
    ]  # fmt: skip
    legend += [replace(look, line=" ") for look in shown]
    sources = ", ".join(escaped(str(data.attrs.get("source", "")).removeprefix("imported from ")) for data in imported)
    own = f" Measured: {style.protocol(measured, shown)}" if measured else ""
    caption = f"Imported: {sources}.{own}"
    note = (
        "Points beside the curves: linear probes of the last layer, with 95 % intervals over samples; at weight 0 "
        "encoders trained by reconstruction (mim), at 1 by contrast (simclr), level lines: others. Imported numbers "
        "are of other networks and data."
    )
    figure = style.page(
        measured, shown, height=2.6, width=theme.panel_width(5.0), legend=legend, caption=caption,
        note=note if measured else "",
    )  # fmt: skip
    ax = figure.subplots()
    for data, (color, marker) in zip(imported, colors, strict=True):
        draw(data, ax, color, marker, names)
    for data, look in zip(measured, shown, strict=True):
        value, low, high = last_layer(data)
        weight = WEIGHTS.get(str(stored(data, "configuration").get("objective", "")), np.nan)
        if np.isfinite(weight):
            ax.errorbar(
                [weight], [value], yerr=broken.bars(value, low, high), color=look.color, marker=look.marker,
                elinewidth=0.8, zorder=3,
            )  # fmt: skip
        else:
            ax.axhline(value, color=look.color, linewidth=0.9)
            ax.plot([0.5], [value], color=look.color, marker=look.marker)
    ax.set(xlabel="weight of the contrastive loss", ylabel="accuracy", xlim=(-0.04, 1.04))
    return figure


def draw(data: xr.Dataset, ax: Axes, color: object, marker: str, names: list[str]) -> Axes:
    """Draw every accuracy of a table over the weight."""
    for name in columns(data):
        known = np.isfinite(data[name].values)
        line = LINES[names.index(name) % len(LINES)]
        ax.plot(data["weight"].values[known], data[name].values[known], color=color, marker=marker, linestyle=line)
    return ax


def columns(data: xr.Dataset) -> list[str]:
    """The accuracies of a table."""
    return [str(name) for name in data.data_vars if str(name).endswith(ACCURACY)]


def in_words(name: str) -> str:
    """A column for the legend."""
    return escaped(name.removesuffix(ACCURACY).replace("_", " "))


def last_layer(data: xr.Dataset) -> tuple[float, float, float]:
    """Accuracy of the linear probe of the last finished layer, with the ends of its 95 % interval."""
    values = data["accuracy"].values
    last = np.flatnonzero(np.isfinite(values))[-1]
    low, high = ends_of(data, "accuracy")
    return float(values[last]), float(low[last]), float(high[last])

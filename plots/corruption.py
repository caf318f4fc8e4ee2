"""Draw accuracy, NLL and calibration error per corruption, mean over severities, all networks in each panel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import Look, escaped
from landscape.plots.appearance import look as look_of
from landscape.plots.figure import Axes, Figure
from landscape.plots.headlines import Numbers

MEANING = (
    "Scores on the test images under each common corruption, mean over the severities, with 95 % intervals over "
    "images; triangles are the clean images. Generated corruptions have the severities of ImageNet-C and are not "
    "comparable to published numbers of CIFAR-10-C, and none of them says how a network fares under others."
)
QUANTILE = 1.96  # of a 95 % interval
METRICS = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE"}
NOTE = "Points: means over severities, with 95 % intervals over images. Triangles: clean images."


def draw(data: xr.Dataset, ax: Axes, *, look: Look | None = None, metric: str = "accuracy", shift: float = 0.0) -> Axes:
    """Draw the mean over severities of every corruption, below each other, and a triangle for the clean images."""
    look = look or look_of(data)
    names = short_names(data)
    place = np.arange(len(names)) + shift
    value, error = data[f"type_{metric}"].values, data[f"type_{metric}_se"].fillna(0.0).values
    ax.errorbar(
        value, place, xerr=QUANTILE * error, color=look.color, marker=look.marker, linestyle="none", label=look.label,
        elinewidth=0.8,
    )  # fmt: skip
    clean = float(data.attrs.get(f"clean_{metric}", np.nan))
    if np.isfinite(clean):
        ax.plot(clean, len(names) + shift, color=look.color, marker="v", linestyle="none", markersize=3.5)
    rows = rows_of(data)
    ax.set_yticks(range(len(rows)), rows)
    ax.set(xlabel=METRICS[metric], ylim=(len(rows) - 0.4, -0.6))
    ax.grid(axis="y", color="0.9", linewidth=0.5)
    ax.set_axisbelow(True)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, every network in each."""
    rows = max(len(data["corruption_name"]) for data in results) + 1
    legend = [look.legend_handle() for look in looks]
    same = len({tuple(rows_of(data)) for data in results}) == 1
    panels = [list(range(len(results)))] if same else [[i] for i in range(len(results))]
    height = len(panels) * (0.125 * max(rows, 6) * (1 + 0.15 * len(panels[0])) + 0.5)
    figure = style.page(results, looks, height=height, legend=legend, note=NOTE)
    grid = figure.subplots(len(panels), len(METRICS), squeeze=False, sharey="row")
    for axes, panel in zip(grid, panels, strict=True):
        for ax, metric in zip(axes, METRICS, strict=True):
            for turn, i in enumerate(panel):
                shift = 0.5 * (turn - (len(panel) - 1) / 2) / max(len(panel), 2)
                draw(results[i], ax, look=looks[i], metric=metric, shift=shift)
    return figure


def rows_of(data: xr.Dataset) -> list[str]:
    """The rows of the figure: the corruptions, and the clean images where their score is known."""
    known = np.isfinite(float(data.attrs.get("clean_accuracy", np.nan)))
    return [*short_names(data), *(["clean"] if known else [])]


def short_names(data: xr.Dataset) -> list[str]:
    """Names of the corruptions, for axes."""
    return [escaped(str(name).replace("_", " ")) for name in data["corruption_name"].values]


def headline(data: xr.Dataset) -> Numbers:
    """Accuracy on clean images, means over corruptions and severities, and errors relative to the baseline."""
    found: Numbers = {"clean accuracy": float(data.attrs.get("clean_accuracy", np.nan))}
    for name in ("accuracy", "nll", "ece"):
        found[f"mean {name}"] = float(data[f"mean_{name}"]) if f"mean_{name}" in data else np.nan
    for name, shown in (("mce", "mCE"), ("mcnll", "mCNLL"), ("mcece", "mCECE")):
        if name in data:
            found[shown] = float(data[name])
    return found

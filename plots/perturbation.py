"""Draw consistency and cross-entropy consistency per perturbation, all networks in each panel."""

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
    "How steady the predictions are along sequences of slowly changing images: the share of neighbouring frames with "
    "the same prediction, the cross-entropy between neighbouring frames, and the accuracy over all frames, with 95 % "
    "intervals over images. A network may be steadily wrong, and a confident one has a lower cross-entropy, so read "
    "the panels together."
)
QUANTILE = 1.96  # of a 95 % interval
LABELS = {"consistency": "consistency", "cross_entropy": "cross-entropy consistency (nats)", "accuracy": "accuracy"}
NOTE = "95 % intervals over images."


def draw(
    data: xr.Dataset, ax: Axes, *, look: Look | None = None, score: str = "consistency", shift: float = 0.0
) -> Axes:
    """Draw a score of every perturbation, below each other."""
    look, names = look or look_of(data), short_names(data)
    error = QUANTILE * data[f"{score}_se"].fillna(0.0).values
    ax.errorbar(
        data[score].values, np.arange(len(names)) + shift, xerr=error, color=look.color, marker=look.marker,
        linestyle="none", label=look.label, elinewidth=0.8,
    )  # fmt: skip
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=LABELS[score], ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="y", color="0.9", linewidth=0.5)
    ax.set_axisbelow(True)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score; networks with the same perturbations share a row."""
    kinds = list(dict.fromkeys(tuple(short_names(data)) for data in results))
    panels = [[i for i, data in enumerate(results) if tuple(short_names(data)) == kind] for kind in kinds]
    heights = [0.16 * len(kind) * (1 + 0.25 * len(panel)) + 0.5 for kind, panel in zip(kinds, panels, strict=True)]
    legend = [look.legend_handle() for look in looks]
    figure = style.page(results, looks, height=max(1.3, sum(heights)), legend=legend, note=NOTE)
    grid = figure.subplots(len(panels), len(LABELS), squeeze=False, sharey="row", height_ratios=heights)
    for axes, panel in zip(grid, panels, strict=True):
        for ax, score in zip(axes, LABELS, strict=True):
            for turn, i in enumerate(panel):
                shift = 0.5 * (turn - (len(panel) - 1) / 2) / max(len(panel), 2)
                draw(results[i], ax, look=looks[i], score=score, shift=shift)
    return figure


def short_names(data: xr.Dataset) -> list[str]:
    """Names of the perturbations, for axes."""
    return [escaped(str(name).replace("_", " ")) for name in data["perturbation_name"].values]


def headline(data: xr.Dataset) -> Numbers:
    """Means over perturbations."""
    words = {"consistency": "consistency", "cross_entropy": "cross-entropy consistency", "accuracy": "accuracy"}
    return {word: float(data[f"mean_{name}"]) for name, word in words.items() if f"mean_{name}" in data}

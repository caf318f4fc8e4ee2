"""Draw scores under corruptions over the size of an ensemble (Park & Kim 2022, arXiv 2105.12639)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.ensemble import count_axis
from landscape.statistics.stored import ends_of, error_of

MEANING = (
    "Scores under corruptions of the first so many members of an ensemble, mean over corruptions and severities, or "
    "relative to a baseline where every result has one. All sizes are of the same members and images, in one order, so "
    "that neighbouring points are not independent and another order gives another curve."
)
RELATIVE = {"mcnll": "mCNLL", "mce": "mCE", "mcece": "mCECE"}
MEANS = {"mean_nll": "mean NLL (nats)", "mean_accuracy": "mean error", "mean_ece": "mean ECE"}
NOTE = "Means over corruptions and severities. Bars: 95 % intervals over images."


def draw(data: xr.Dataset, ax: Axes, *, look: Look, quantity: str = "") -> Axes:
    """Draw a score over the number of members, by default mCNLL or, without a baseline, the mean NLL."""
    quantity = quantity or next(iter(panels([data])))
    value, error = data[f"size_{quantity}"].values, error_of(data, f"size_{quantity}")
    low, high = ends_of(data, f"size_{quantity}")
    if quantity == "mean_accuracy":
        value, low, high = 1 - value, 1 - high, 1 - low
    bars = broken.bars(value, low, high)
    ax.errorbar(data["size"].values, value, yerr=bars, **look.cues, elinewidth=0.7, label=look.label)
    broken.mark(ax, data["size"].values, value, error)
    ax.set(xlabel="members", ylabel={**RELATIVE, **MEANS}[quantity])
    count_axis(ax, data["size"].values)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, every ensemble in each."""
    chosen = panels(results)
    figure, axes = style.beside(results, looks, len(chosen), height=2.0, legend=looks, note=NOTE)
    sizes = np.unique(np.concatenate([data["size"].values for data in results]))
    for ax, quantity in zip(axes, chosen, strict=True):
        for data, look in zip(results, looks, strict=True):
            draw(data, ax, look=look, quantity=quantity)
        count_axis(ax, sizes)
    style.label_outer(axes, same=False)
    return figure


def panels(results: Sequence[xr.Dataset]) -> list[str]:
    """The scores that are drawn: those relative to a baseline where all results have them."""
    relative = all(_is_known(data, name) for data in results for name in RELATIVE)
    return list(RELATIVE if relative else MEANS)


def _is_known(data: xr.Dataset, quantity: str) -> bool:
    return f"size_{quantity}" in data and bool(np.isfinite(data[f"size_{quantity}"]).any())

"""Draw the shape bias of every category as a strip, with the bias of all pictures (Geirhos et al. 2019, Fig. 4)."""

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
    "The share of decisions for the shape among decisions for the shape or the texture of pictures that combine both "
    "from different classes: points per category of the shape with their standard error, lines for all pictures with "
    "95 % intervals. It leaves out pictures decided for neither (the accuracies in the results file say how many), and "
    "generated pictures of phase and amplitude are not comparable to those of style transfer."
)
QUANTILE = 1.96  # of a 95 % interval
NAMED = 40  # categories that are named on the axis
NOTE = "Points: categories, with standard errors. Lines: all pictures, with 95 % intervals."


def draw(data: xr.Dataset, ax: Axes, *, look: Look | None = None, shift: float = 0.0) -> Axes:
    """Draw the bias of every category, below each other, and that of all pictures as a vertical line."""
    look = look or look_of(data)
    names = [escaped(str(name).replace("_", " ")) for name in data["category_name"].values]
    value, error = data["category_bias"].values, data["category_bias_se"].fillna(0.0).values
    place = np.arange(len(names)) + shift
    ax.errorbar(
        value, place, xerr=error, color=look.color, marker=look.marker, linestyle="none", elinewidth=0.6, markersize=3,
        label=look.label,
    )  # fmt: skip
    bias, half = float(data["shape_bias"]), QUANTILE * float(data["shape_bias_se"])
    if np.isfinite(bias):
        ax.axvline(bias, color=look.color, linewidth=1.0)
        if np.isfinite(half):
            ax.axvspan(bias - half, bias + half, color=look.color, alpha=0.15, linewidth=0)
    step = max(1, -(-len(names) // NAMED))
    ax.set_yticks(range(0, len(names), step), names[::step])
    ax.set(xlim=(0, 1), ylim=(len(names) - 0.4, -0.6), xlabel="share of shape decisions (0: texture, 1: shape)")
    ax.grid(axis="y", color="0.92", linewidth=0.5)
    ax.set_axisbelow(True)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All networks with the same categories in one panel."""
    kinds = list(dict.fromkeys(tuple(data["category_name"].values.tolist()) for data in results))
    heights = [0.14 * min(len(kind), 40) + 0.6 for kind in kinds]
    legend = [look.legend_handle() for look in looks]
    figure = style.page(results, looks, height=sum(heights), legend=legend, note=NOTE)
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, kind in zip(axes, kinds, strict=True):
        panel = [i for i, data in enumerate(results) if tuple(data["category_name"].values.tolist()) == kind]
        for turn, i in enumerate(panel):
            draw(results[i], ax, look=looks[i], shift=0.5 * (turn - (len(panel) - 1) / 2) / max(len(panel), 2))
    return figure


def headline(data: xr.Dataset) -> Numbers:
    """The shape bias and the shares of decisions for shape and texture."""
    names = {"shape_bias": "shape bias", "shape_accuracy": "by shape", "texture_accuracy": "by texture"}
    return {word: float(data[name]) for name, word in names.items() if name in data}

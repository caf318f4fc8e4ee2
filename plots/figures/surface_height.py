"""Draw the mean rise of the loss over the distance from the weights, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.appearance import escaped, loss_label
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import error_of, half_width

MEANING = (
    "How far the loss rises on average over a circle around the weights, linear between the points of the grid, with "
    "95 % intervals over samples as bars. A line is one pair of random directions; where several pairs differ by more "
    "than the bars, the plane matters more than the samples."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look, shift: float = 0.0) -> Axes:
    """Draw the heights at the stored radii, times 1 + shift so that bars do not hide each other, with intervals."""
    at, height = data["radius"].values * (1 + shift), data["height"].values
    error, half = error_of(data, "height"), np.broadcast_to(half_width(data, "height"), height.shape)
    known = np.isfinite(height)
    ax.errorbar(
        at[known], height[known], broken.bar(half[known]), **look.cues, linewidth=0.9, elinewidth=0.8, capsize=1.5,
        label=look.label,
    )  # fmt: skip
    broken.mark(ax, at, height, error if "height_se" in data else None)
    if not known.any():
        style.write_centred(ax, "too few points yet", fontsize=7)
    ax.set(xlabel=f"distance from the weights ({_units(data)})", ylabel=loss_label([data], "mean rise of the loss"))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results, one panel per unit of distance, logarithmic where all heights are positive."""
    figure = style.page(results, looks, height=2.5, legend=looks, note="Bars: 95 % intervals over samples.")
    units = list(dict.fromkeys(_units(data) for data in results))
    panels = figure.subplots(1, len(units), sharey=True, squeeze=False)[0]
    for i, (data, look) in enumerate(zip(results, looks, strict=True)):
        ax = panels[units.index(_units(data))]
        draw(data, ax, look=replace(look, label="_"), shift=0.012 * (i - (len(results) - 1) / 2))
    heights = np.concatenate([data["height"].values for data in results])
    heights = heights[np.isfinite(heights)]
    for ax in panels if heights.size and (heights > 0).all() else ():
        ax.set(xscale="log", yscale="log")
        radii = results[0]["radius"].values
        ax.set_xticks(radii, [f"{radius:g}" for radius in radii])
        ax.minorticks_off()
    for ax in panels[1:]:
        ax.set_ylabel("")
    return figure


def _units(data: xr.Dataset) -> str:
    return escaped(str(data["x"].attrs.get("units", "1")))

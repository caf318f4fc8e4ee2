"""Relative log amplitude of feature maps over frequency, all layers of a network (Park & Kim 2022, Fig. 2a)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import Look
from landscape.plots.headlines import Numbers, ends, finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEANING = (
    "The Fourier spectrum of the feature maps along its diagonal, relative to each layer's own zero "
    "frequency, from the first layer (dark) to the last (bright): the lower a line ends, the smoother the "
    "map. Frequencies are those of the layer's own grid, and what is low-pass for the map need not be so for "
    "the input."
)


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw one line per layer over its true frequencies, coloured from shallow to deep."""
    import matplotlib

    colors = matplotlib.colormaps["plasma"]
    width = 1.0 if data.sizes["layer"] <= 30 else 0.6
    for layer in range(data.sizes["layer"]):
        row = data.isel(layer=layer)
        shown = row["delta_log_amplitude"].notnull() & row["frequency"].notnull()
        if shown.sum() > 1:  # a map of one position has the zero frequency alone
            ax.plot(
                row["frequency"].values[shown.values],
                row["delta_log_amplitude"].values[shown.values],
                color=colors(0.95 * float(row["depth"])),  # the end of plasma is too bright on white
                linewidth=width,
            )
    ax.set(xlim=(0, 1), ylabel="relative log amplitude Δ\u00a0ln\u00a0A", xlabel="frequency")
    ax.set_xticks([0, 0.5, 1], ["0", r"0.5$\pi$", r"$\pi$"])
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per network on common axes, with the depth that a colour means."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    figure, axes = style.panels(answers, looks, aspect=0.85)
    for data, ax in zip(answers, axes, strict=True):
        draw(data, ax)
    style.outer(axes)
    colors = matplotlib.colormaps["plasma"].with_extremes()
    shades = ListedColormap([colors(0.95 * i / 255) for i in range(256)])
    figure.colorbar(ScalarMappable(Normalize(0, 1), shades), ax=axes, label="normalised depth", aspect=30, pad=0.02)
    return figure


def headline(data: xr.Dataset) -> Numbers:
    """Relative log amplitude at the highest frequency of the first and of the last layer that has one."""
    return ends(finite(data, "high_frequency"))

"""Draw the relative log amplitude of feature maps over frequency, for all layers (Park & Kim 2022, Fig. 2a)."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots import depth, style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "The Fourier spectrum of the feature maps along its diagonal, relative to each layer's own zero frequency, from "
    "the first layer (dark) to the last (bright): the lower a line ends, the smoother the map. Frequencies are those "
    "of the layer's own grid, and what is low-pass for the map need not be so for the input."
)


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw one line per layer over its true frequencies, coloured from shallow to deep."""
    width = 1.0 if data.sizes["layer"] <= 30 else 0.6
    for layer in range(data.sizes["layer"]):
        row = data.isel(layer=layer)
        shown = row["delta_log_amplitude"].notnull() & row["frequency"].notnull()
        if shown.sum() > 1:  # a map of one position has the zero frequency only
            x, y = (row[name].values[shown.values] for name in ("frequency", "delta_log_amplitude"))
            ax.plot(x, y, color=depth.color(float(row["depth"])), linewidth=width)
    ax.set(xlim=(0, 1), ylabel="relative log amplitude Δ\u00a0ln\u00a0A", xlabel="frequency")
    ax.set_xticks([0, 0.5, 1], ["0", r"0.5$\pi$", r"$\pi$"])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per network on common axes, with a colour bar of depth."""
    figure, axes = style.panels(results, looks, aspect=0.85)
    for data, ax in zip(results, axes, strict=True):
        draw(data, ax)
    style.label_outer(axes)
    depth.color_bar(figure, axes, aspect=30)
    return figure

"""Draw the shape bias of every category as a strip, with the bias of all pictures (Geirhos et al. 2019, Fig. 4)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import rows
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import ends_of

MEANING = (
    "The share of decisions for the shape among decisions for the shape or the texture of pictures that combine both "
    "from different classes: points per category of the shape, lines for all pictures, both with 95 % "
    "intervals. It leaves out pictures decided for neither (the accuracies in the results file say how many), and "
    "generated pictures of phase and amplitude are not comparable to those of style transfer."
)
NOTE = "Points: categories. Lines: all pictures. Both with 95 % intervals (Wilson)."


def draw(data: xr.Dataset, ax: Axes, column: str = "", *, look: Look, shift: float = 0.0) -> Axes:
    """Draw the bias of every category, below each other, and that of all pictures as a vertical line."""
    value, ends = data["category_bias"].values, ends_of(data, "category_bias")
    rows.draw(ax, names_of(data), value, ends, look=look, shift=shift)
    bias = float(data["shape_bias"])
    if np.isfinite(bias):
        low, high = ends_of(data, "shape_bias")
        ax.axvline(bias, color=look.color, linewidth=1.0)
        if np.isfinite(low):
            ax.axvspan(float(low), float(high), color=look.color, alpha=0.15, linewidth=0)
    ax.set(xlim=(-0.02, 1.02), xlabel="share of shape decisions (0: texture, 1: shape)")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All networks with the same categories in one panel."""
    return rows.page(results, looks, ["category_bias"], draw, names_of, note=NOTE)[0]


def names_of(data: xr.Dataset) -> list[str]:
    """Names of the categories, for axes."""
    return rows.names(data, "category_name")

"""How well every point of a surface is known: its standard error over samples, relative to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from landscape.plots.appearance import Look
from landscape.plots.surface import axis_label, places
from landscape.plots.surface_heat import panels_of, scale

MEANING = (
    "The standard error of the loss over samples as a share of the loss, on one colour scale for all panels: where it "
    "is large, more samples are needed before the surface says anything. All points share their samples, so the shape "
    "of a surface is known better than its level, and errors between training runs are not in it."
)
COLORS = matplotlib.colormaps["viridis"]


def surface_error(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw the relative standard error of every grid point; cells without one stay grey.

    Args:
        data: a stored answer.
        ax: where to draw.
        norm: of the colours; default: from the data.
    """
    x, y = data["x"].values, data["y"].values
    ax.set_facecolor("0.88")
    shown = np.ma.masked_invalid(relative(data)["relative"].transpose("y", "x").values)
    norm = norm or scale([relative(data)], "relative")
    ax.pcolormesh(x, y, shown, cmap=COLORS, norm=norm, shading="nearest", rasterized=True)
    limits = {"xlim": ax.get_xlim(), "ylim": ax.get_ylim()}  # of the cells, whatever lies beyond
    places(data, ax)
    ax.set(xlabel=axis_label(data, "x"), ylabel=axis_label(data, "y"), **limits)
    if 1 / 3 < np.ptp(x) / np.ptp(y) < 3:
        ax.set_aspect("equal")
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per answer and one colour bar."""
    norm = scale([relative(data) for data in answers], "relative")
    return panels_of(answers, looks, surface_error, norm, "standard error / loss", "")


def relative(data: xr.Dataset) -> xr.Dataset:
    """An answer with the share that the standard error is of the loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return data.assign(relative=data["loss_se"] / np.abs(data["loss"]))

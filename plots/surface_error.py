"""How well every point of a surface is known: its standard error over samples, relative to the loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from landscape.plots.appearance import Look
from landscape.plots.surface import places
from landscape.plots.surface_heat import cells, panels_of, scale

MEANING = (
    "The standard error of the loss over samples as a share of the loss, on one colour scale for all panels: where it "
    "is large, more samples are needed before the surface says anything. All points share their samples, so the shape "
    "of a surface is known better than its level, and errors between training runs are not in it."
)


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw the relative standard error of every grid point; cells without one stay grey.

    Args:
        data: a stored answer.
        ax: where to draw.
        norm: of the colours; default: from the data.
    """
    shares = relative(data)
    cells(ax, shares, "relative", norm or scale([shares], "relative"))
    places(data, ax)
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per answer and one colour bar."""
    norm = scale([relative(data) for data in answers], "relative")
    return panels_of(answers, looks, draw, norm, "standard error / loss", "")


def relative(data: xr.Dataset) -> xr.Dataset:
    """An answer with the share that the standard error is of the loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return data.assign(relative=data["loss_se"] / np.abs(data["loss"]))

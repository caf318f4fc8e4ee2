"""Draw the standard error of every point of a surface over samples, relative to the loss."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import xarray as xr

from landscape.plots import plane, style
from landscape.plots.figure import Axes, Figure, Look, Normalize
from landscape.plots.figures.surface_heat import colour_scale, draw_map

MEANING = (
    "The standard error of the loss over samples as a share of the loss, on one colour scale for all panels: where it "
    "is large, the surface needs more samples to be meaningful. All points share their samples, so the shape "
    "of a surface is known better than its level, and variation between training runs is not included."
)


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw the relative standard error of every grid point; cells without one stay grey."""
    shares = _relative(data)
    draw_map(shares, ax, "relative", norm or colour_scale([shares], "relative"))
    plane.mark_checkpoints(data, ax)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result and one colour bar."""
    norm = colour_scale([_relative(data) for data in results], "relative")
    figure, axes = plane.page_of_maps(results, looks, partial(draw, norm=norm))
    style.colour_bar(figure, axes, norm, plane.COLORS, "standard error / loss")
    return figure


def _relative(data: xr.Dataset) -> xr.Dataset:
    """A result with the ratio of the standard error to the loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return data.assign(relative=data["loss_se"] / np.abs(data["loss"]))

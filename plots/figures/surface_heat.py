"""Draw the loss on a plane as a heat map on a logarithmic colour scale, with marks of how each value was obtained."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import xarray as xr

from landscape.plots import appearance, plane, style
from landscape.plots.figure import Axes, Figure, Look, Normalize

MEANING = (
    "The loss of every grid point, unsmoothed, on one logarithmic colour scale for all panels: equal steps of colour "
    "are equal ratios of the loss. Dots mark the points that a preview evaluated (the others are interpolated) and "
    "crosses those stopped early above the cap, whose value is rough."
)


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw one cell per grid point; unfinished ones and those that are not finite stay grey."""
    draw_map(data, ax, "loss", norm or colour_scale([data]))
    x, y = data["x"].values, data["y"].values
    if "evaluated" in data:
        _mark(ax, x, y, data["evaluated"].transpose("y", "x").values == 1, ".", "w")
    if "n" in data:
        n = data["n"].transpose("y", "x").values
        _mark(ax, x, y, n < np.nanmax(n, initial=0), "x", "0.9")
    plane.mark_checkpoints(data, ax)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result and one colour bar."""
    norm = colour_scale(results)
    figure, axes = plane.page_of_maps(results, looks, partial(draw, norm=norm))
    style.colour_bar(figure, axes, norm, plane.COLORS, appearance.loss_label(results))
    return figure


def draw_map(data: xr.Dataset, ax: Axes, quantity: str, norm: Normalize) -> None:
    """One cell per grid point with labelled axes, whose limits are those of the cells."""
    plane.draw_cells(ax, data, quantity, norm)
    plane.label_axes(data, ax, xlim=ax.get_xlim(), ylim=ax.get_ylim())


def colour_scale(results: Sequence[xr.Dataset], quantity: str = "loss") -> Normalize:
    """Colours from the smallest to the largest finite value of all results; logarithmic where all are positive."""
    from matplotlib.colors import LogNorm, Normalize

    values = np.concatenate([data[quantity].values[np.isfinite(data[quantity].values)] for data in results])
    if not values.size:
        return Normalize(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if low == high:
        return Normalize(low, low + 1.0)
    return LogNorm(low, high) if low > 0 else Normalize(low, high)


def _mark(ax: Axes, x: np.ndarray, y: np.ndarray, where: np.ndarray, marker: str, color: str) -> None:
    rows, columns = np.nonzero(where)
    ax.plot(x[columns], y[rows], marker, color=color, markersize=1.4, markeredgewidth=0.5, alpha=0.8, linestyle="")

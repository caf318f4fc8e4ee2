"""The path of training over the surface of its own plane (Li et al. 2018, Fig. 9), or checkpoints on theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import xarray as xr
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from landscape.plots import style
from landscape.plots.appearance import Look, loss_units, plain
from landscape.plots.surface import axis_label, cells, named, steps

MEANING = (
    "Snapshots of a run projected onto the plane that holds most of its path (or the checkpoints that span a plane), "
    "over the loss on that plane; a star marks the weights through which the plane passes. Snapshots lie off the plane "
    "of a run, often by as much as they lie apart, so that the colour under one is not its loss: compare both in the "
    "trajectory figures."
)
COLORS = matplotlib.colormaps["viridis"]
NAMED = 9  # snapshots at most that carry their name
CLOSE = 0.07  # share of the axes, below which two names would touch


def draw(data: xr.Dataset, ax: Axes, *, levels: np.ndarray | None = None) -> Axes:
    """Draw contours of the loss and the path over them; cells not measured yet stay grey.

    Args:
        data: a stored answer with a path.
        ax: where to draw.
        levels: of the contours; default: from the data.
    """
    levels = steps([data]) if levels is None else levels
    norm = BoundaryNorm(levels, COLORS.N, extend="both")
    x, y = data["x"].values, data["y"].values
    loss = np.ma.masked_invalid(data["loss"].transpose("y", "x").values)
    ax.set_facecolor("0.88")
    ax.pcolormesh(x, y, loss, cmap=COLORS, norm=norm, shading="nearest", rasterized=True)
    if cells(data["loss"].transpose("y", "x").values).any():
        ax.contourf(x, y, loss, levels=levels, cmap=COLORS, norm=norm, extend="both")
        ax.contour(x, y, loss, levels=levels, colors="k", linewidths=0.2, alpha=0.6)
    along, across = data["path_x"].values, data["path_y"].values
    outline = [patheffects.withStroke(linewidth=2.2, foreground="k")]
    joined = data.attrs.get("plane") != "checkpoints"
    ax.plot(along, across, color="w", marker="o", markersize=3, markeredgecolor="k", markeredgewidth=0.4,
            linewidth=1.0 if joined else 0.0, path_effects=outline if joined else None)  # fmt: skip
    ax.plot(0.0, 0.0, "*", color="w", markersize=9, markeredgecolor="k", markeredgewidth=0.5)
    for i in _named(along / np.ptp(x), across / np.ptp(y)):
        named(ax, data, float(along[i]), float(across[i]), _name(data, i))
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    for name, label in (("x", ax.set_xlabel), ("y", ax.set_ylabel)):
        label(style.fitted(axis_label(data, name), 0.35 * style.PAGE, 7), fontsize=7)
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per answer with common contour levels and one colour bar."""
    levels = steps(answers)
    note = "A star: the weights through which the plane passes."
    columns = min(len(answers), 2)
    rows = math.ceil(len(answers) / columns)
    width = style.PAGE if columns > 1 else 0.7 * style.PAGE
    figure = style.page(answers, looks, height=2.4 * rows, width=width, note=note)
    grid = figure.subplots(rows, columns, squeeze=False)
    for spare in grid.flat[len(answers) :]:
        spare.remove()
    for data, look, ax in zip(answers, looks, grid.flat, strict=False):
        draw(data, ax, levels=levels)
        ax.set_title(style.fitted(look.label, 0.8 * width / columns, style.RC["axes.titlesize"]))
    figure.colorbar(
        ScalarMappable(BoundaryNorm(levels, COLORS.N, extend="both"), COLORS), ax=list(grid.flat[: len(answers)]),
        label=f"loss ({loss_units(answers)})", aspect=30, pad=0.02, ticks=levels, format="%.3g", spacing="uniform",
        extend="both",
    )  # fmt: skip
    return figure


def _named(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Which points carry their names: from the start on, as many as do not touch."""
    chosen: list[int] = []
    for i in range(len(x)):
        if len(chosen) < NAMED and all(max(abs(x[i] - x[j]), abs(y[i] - y[j])) > CLOSE for j in chosen):
            chosen.append(i)
    return chosen


def _name(data: xr.Dataset, i: int) -> str:
    return plain(str(data["path_name"].values[i])) if "path_name" in data else str(i)

"""Draw the path of training over the surface of its own plane (Li et al. 2018, Fig. 9), or checkpoints on theirs."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, plane, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.surface import add_colour_bar, contour_levels, fill_contours

MEANING = (
    "Snapshots of a run projected onto the plane that holds most of its path (or the checkpoints that span a plane), "
    "over the loss on that plane; a star marks the weights through which the plane passes. Snapshots lie off the plane "
    "of a run, often by as much as they lie apart, so that the colour under one is not its loss: compare both in the "
    "trajectory figures."
)
MAX_NAMES = 9  # of snapshots
MIN_DISTANCE = 0.07  # share of the axes; closer names would touch


def draw(data: xr.Dataset, ax: Axes, *, levels: np.ndarray | None = None) -> Axes:
    """Draw contours of the loss and the path over them; unfinished cells stay grey."""
    from matplotlib import patheffects

    levels = contour_levels([data]) if levels is None else levels
    x, y = data["x"].values, data["y"].values
    loss = fill_contours(data, ax, levels)
    if plane.complete_cells(loss.filled(np.nan)).any():
        ax.contour(x, y, loss, levels=levels, colors="k", linewidths=0.2, alpha=0.6)
    along, across = data["path_x"].values, data["path_y"].values
    outline = [patheffects.withStroke(linewidth=2.2, foreground="k")]
    joined = data.attrs.get("plane") != "checkpoints"
    ax.plot(along, across, color="w", marker="o", markersize=3, markeredgecolor="k", markeredgewidth=0.4,
            linewidth=1.0 if joined else 0.0, path_effects=outline if joined else None)  # fmt: skip
    ax.plot(0.0, 0.0, "*", color="w", markersize=9, markeredgecolor="k", markeredgewidth=0.5)
    for i in _labelled(along / np.ptp(x), across / np.ptp(y)):
        name = appearance.escaped(str(data["path_name"].values[i])) if "path_name" in data else str(i)
        plane.annotate(ax, data, float(along[i]), float(across[i]), name)
    ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    for name, label in (("x", ax.set_xlabel), ("y", ax.set_ylabel)):
        label(style.fitted(plane.axis_label(data, name), 0.35 * theme.page_width(), 7), fontsize=7)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result with common contour levels and one colour bar."""
    levels = contour_levels(results)
    note = "A star: the weights through which the plane passes."
    columns = 1 if theme.narrow() else min(len(results), 2)
    width = theme.page_width() if columns > 1 else theme.panel_width(0.7 * theme.PAGE)
    height = 1.9 if theme.narrow() else 2.4
    figure, axes = style.beside(results, looks, len(results), height=height, columns=columns, width=width, note=note)
    for data, look, ax in zip(results, looks, axes, strict=True):
        draw(data, ax, levels=levels)
        ax.set_title(style.fitted(look.label, 0.8 * width / columns, style.RC["axes.titlesize"]))
    add_colour_bar(figure, axes, results, levels)
    return figure


def _labelled(x: np.ndarray, y: np.ndarray) -> list[int]:
    """Which points are labelled: from the start on, as many as do not overlap."""
    labelled: list[int] = []
    for i in range(len(x)):
        distances = (max(abs(x[i] - x[j]), abs(y[i] - y[j])) for j in labelled)
        if len(labelled) < MAX_NAMES and all(distance > MIN_DISTANCE for distance in distances):
            labelled.append(i)
    return labelled

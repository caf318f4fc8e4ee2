"""Lay out a value per named row: the rows below each other, and the networks that have them side by side."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, broken, style, theme
from landscape.plots.figure import Axes, Draw, Figure, Look
from landscape.statistics.intervals import Ends

HEAD = 0.6  # inches of a panel beside its rows
ROW, MOST = 0.13, 40  # inches of a row of one network; rows that are named, and have that height, at most


def names(data: xr.Dataset, label: str) -> list[str]:
    """Names that a result stores, for an axis."""
    return [appearance.escaped(str(name).replace("_", " ")) for name in data[label].values]


def draw(
    ax: Axes, rows: Sequence[str], value: np.ndarray, ends: Ends, *, look: Look, shift: float = 0.0, size: float = 3.5
) -> Axes:
    """Draw the values of the first rows as points with intervals, below each other; the other rows stay empty."""
    low, high = ends
    at = np.arange(len(value)) + shift
    broken.mark(ax, at, value, np.stack([low, high]), flat=True)
    ax.errorbar(
        value, at, xerr=broken.bars(value, low, high), color=look.color, marker=look.marker, linestyle="none",
        label=look.label, elinewidth=0.8, markersize=size,
    )  # fmt: skip
    step = max(1, -(-len(rows) // MOST))
    ax.set_yticks(range(0, len(rows), step), rows[::step])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(axis="y", linewidth=0.5)
    ax.set_axisbelow(True)
    return ax


def page(
    results: Sequence[xr.Dataset],
    looks: Sequence[Look],
    columns: Sequence[str],
    draw: Draw,
    rows: Callable[[xr.Dataset], Sequence[str]],
    *,
    note: str,
    below: float = 0.0,
) -> tuple[Figure, Any]:
    """A panel per column; results with other rows get panels of their own below.

    `draw` draws a result in the axes of a column, in its `look`, moved down by the `shift`, a share of a row.
    `below` inches stay free under the panels, as the second figure that is returned (None without them).
    """
    kinds = list(dict.fromkeys(tuple(rows(data)) for data in results))
    panels = [[i for i, data in enumerate(results) if tuple(rows(data)) == kind] for kind in kinds]
    heights = [
        ROW * min(max(len(kind), 5), MOST) * (1 + 0.2 * (len(panel) - 1)) + (0.9 if theme.narrow() else 0.5)
        for kind, panel in zip(kinds, panels, strict=True)
    ]
    legend = [replace(look, line=" ") for look in looks]  # the points have no lines
    figure = style.page(results, looks, height=sum(heights) + below, legend=legend, note=note)
    parts: Any = figure.subfigures(2, 1, height_ratios=[sum(heights), below]) if below else (figure, None)
    above, under = parts
    grid = above.subplots(len(panels), len(columns), squeeze=False, sharey="row", height_ratios=heights)
    for axes, panel in zip(grid, panels, strict=True):
        for ax, column in zip(axes, columns, strict=True):
            for turn, i in enumerate(panel):
                shift = 0.5 * (turn - (len(panel) - 1) / 2) / max(len(panel), 2)
                draw(results[i], ax, column, look=looks[i], shift=shift)
    return figure, under


def panel_each(
    results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, axis: str, row: float, *, note: str = ""
) -> Figure:
    """A panel per result, up to three side by side, as high as the longest `axis` needs with `row` inches each."""
    columns = min(len(results), 3)
    lines = -(-len(results) // columns)
    width = theme.page_width() if columns > 1 else theme.panel_width(0.75 * theme.PAGE)
    height = lines * (HEAD + row * max(data.sizes[axis] for data in results))
    figure = style.page(results, looks, height=height, width=width, note=note)
    for data, look, ax in zip(results, looks, style.grid(figure, len(results), columns), strict=True):
        draw(data, ax, look=look)
        ax.set_title(style.fitted(look.label, width / columns, style.SMALL), fontsize=style.SMALL)
    return figure

"""Draw contours of the loss on a plane through the weights (Li et al. 2018, Fig. 5)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import plane, style, tidy
from landscape.plots.appearance import loss_label
from landscape.plots.figure import Axes, BoundaryNorm, Figure, Look

MEANING = (
    "The loss on a plane through the trained weights (cross), in steps that all panels share: wider contours mean a "
    "flatter minimum along these directions. Two directions out of millions show neither the whole valley nor its "
    "sharpest walls, and networks compare only under one protocol and one normalisation of the directions."
)
EDGE = 0.09  # share of the axes beside which no contour is labelled
MIN_CONTOURS = 3  # that a panel should have


def draw(data: xr.Dataset, ax: Axes, *, levels: np.ndarray | None = None) -> Axes:
    """Draw labelled contours of the loss; unfinished cells stay grey, dots mark a loss that is not finite."""
    levels = contour_levels([data]) if levels is None else levels
    x, y = data["x"].values, data["y"].values
    loss = fill_contours(data, ax, levels)
    if plane.complete_cells(loss.filled(np.nan)).any():
        ax.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        within = levels[(levels > loss.min()) & (levels < loss.max())]
        if within.size:
            lines = ax.contour(x, y, loss, levels=within, colors="k", linewidths=0.35)
            label_contours(ax, lines, within[::2])
    rows, columns = np.nonzero((data["done"].transpose("y", "x").values == 1) & np.ma.getmaskarray(loss))
    ax.plot(x[columns], y[rows], ".", color="0.4", markersize=1.5, label="loss not finite")
    plane.mark_checkpoints(data, ax)
    plane.label_axes(data, ax, xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result with common contour levels and one colour bar."""
    levels = contour_levels(results)
    lost = any((~np.isfinite(data["loss"].where(data["done"] == 1, 0.0).values)).any() for data in results)
    note = "Dots: the loss is not finite." if lost else ""
    figure, axes = plane.page_of_maps(results, looks, partial(draw, levels=levels), note)
    add_colour_bar(figure, axes, results, levels)
    return figure


def fill_contours(data: xr.Dataset, ax: Axes, levels: np.ndarray) -> np.ma.MaskedArray[Any, Any]:
    """Fill the contours over the cells, so that single finished cells show too; returns the loss, masked, (y, x)."""
    loss = plane.draw_cells(ax, data, "loss", _norm(levels))
    if plane.complete_cells(loss.filled(np.nan)).any():
        x, y = data["x"].values, data["y"].values
        ax.contourf(x, y, loss, levels=levels, cmap=plane.COLORS, norm=_norm(levels), extend="both")
    return loss


def label_contours(ax: Axes, lines: Any, levels: np.ndarray) -> None:
    """Label contours inside the axes; a label at the edge would be cut off, and is left out."""
    from matplotlib import patheffects

    halo: list[Any] = [patheffects.withStroke(linewidth=1.2, foreground="w")]
    for text in ax.clabel(lines, levels=levels, fontsize=6, fmt="%.3g", inline=False, colors="k"):
        text.set(path_effects=halo, gid=tidy.CROWDED)
        x, y = ax.transAxes.inverted().transform(ax.transData.transform(text.get_position()))
        if not (EDGE < x < 1 - EDGE and EDGE < y < 1 - EDGE):
            text.remove()


def add_colour_bar(
    figure: Figure, axes: Sequence[Axes], results: Sequence[xr.Dataset], levels: np.ndarray, **how: Any
) -> None:
    """The colour bar of contours."""
    marks = {"ticks": levels, "format": "%.3g", "spacing": "uniform", "extend": "both", **how}
    style.colour_bar(figure, axes, _norm(levels), plane.COLORS, loss_label(results), **marks)


def contour_levels(results: Sequence[xr.Dataset]) -> np.ndarray:
    """Contour levels that fit all results: even, or such as 1, 2, 5 where the loss spans orders of magnitude.

    Also where even levels would leave a flat result beside a steep one without contours. The upper end is a quantile:
    a few cells at the corners may be larger by orders of magnitude.
    """
    from matplotlib.ticker import MaxNLocator

    each = [data["loss"].values[np.isfinite(data["loss"].values)] for data in results]
    values = np.concatenate(each)
    low, high = float(values.min()), float(np.quantile(values, 0.9))
    even = np.unique(MaxNLocator(12).tick_values(low, high if high > low else low + 1.0))
    crossed = [((even > losses.min()) & (even < losses.max())).sum() for losses in each if losses.size]
    if high <= 20 * max(low, 0.0) and (high <= 4 * low or min(crossed) >= MIN_CONTOURS):
        return even
    low = max(low, 1e-3 * high)
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    within = (1.0, 2.0, 5.0) if high > 300 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    series = np.outer(10.0**decades, within).ravel()
    return np.asarray(series[np.searchsorted(series, low, "right") - 1 : np.searchsorted(series, high) + 1])


def _norm(levels: np.ndarray) -> BoundaryNorm:
    """One colour per interval, however unequal the intervals."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    return BoundaryNorm(levels, colormaps[plane.COLORS].N, extend="both")


def notes(data: xr.Dataset) -> dict[str, str]:
    """The errors of faster modes."""
    measures = {"hold_out_error": "hold-out error at most", "deviation_max": "deviation at most (standard errors)"}
    known = {words: float(data.variables[name].values) for name, words in measures.items() if name in data}
    return {words: f"{value:.4g}" for words, value in known.items() if np.isfinite(value)}

"""The loss on a plane as a map of cells on a logarithmic colour scale, with what is behind each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from landscape.plots import style
from landscape.plots.appearance import Look, loss_units
from landscape.plots.surface import alike, axis_label, places

MEANING = (
    "The loss of every grid point, unsmoothed, on one logarithmic colour scale for all panels: equal steps of colour "
    "are equal ratios of the loss. Dots mark the points that a preview evaluated (the others are interpolated) and "
    "crosses those left early above a cap, whose value is rough."
)
Draw = Callable[..., Axes]
COLORS = matplotlib.colormaps["viridis"]


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw one cell per grid point; not yet measured and not finite ones stay grey.

    Args:
        data: a stored answer.
        ax: where to draw.
        norm: of the colours; default: from the data.
    """
    cells(ax, data, "loss", norm or scale([data]))
    x, y = data["x"].values, data["y"].values
    if "evaluated" in data:
        _mark(ax, x, y, data["evaluated"].transpose("y", "x").values == 1, ".", "w")
    if "n" in data:
        n = data["n"].transpose("y", "x").values
        _mark(ax, x, y, n < np.nanmax(n, initial=0), "x", "0.9")
    places(data, ax)
    return ax


def cells(ax: Axes, data: xr.Dataset, quantity: str, norm: Normalize) -> None:
    """One cell per grid point, labelled; those without a finite value stay grey."""
    x, y = data["x"].values, data["y"].values
    shown = np.ma.masked_invalid(data[quantity].transpose("y", "x").values)
    ax.set_facecolor("0.88")
    ax.pcolormesh(x, y, shown, cmap=COLORS, norm=norm, shading="nearest", rasterized=True)
    limits = {"xlim": ax.get_xlim(), "ylim": ax.get_ylim()}  # of the cells, whatever is drawn beyond them
    ax.set(xlabel=axis_label(data, "x"), ylabel=axis_label(data, "y"), **limits)
    if 1 / 3 < np.ptp(x) / np.ptp(y) < 3:
        ax.set_aspect("equal")


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per answer and one colour bar."""
    return panels_of(answers, looks, draw, scale(answers), f"loss ({loss_units(answers)})", "")


def panels_of(
    answers: Sequence[xr.Dataset], looks: Sequence[Look], draw_one: Draw, norm: Normalize, label: str, note: str
) -> Figure:
    """Maps with one colour scale, their axis labels on the outside alone where all share them."""
    figure, axes = style.panels(answers, looks, aspect=0.8, share=False, note=note, bar=0.2 if alike(answers) else 0.35)
    for data, ax in zip(answers, axes, strict=True):
        draw_one(data, ax, norm=norm)
    style.outer(axes, alike=alike(answers))
    bar = figure.colorbar(ScalarMappable(norm, COLORS), ax=axes, label=label, aspect=30, pad=0.02)
    if isinstance(norm, LogNorm) and norm.vmax is not None and norm.vmin is not None and norm.vmax < 30 * norm.vmin:
        ticks = nice(float(norm.vmin), float(norm.vmax))
        bar.set_ticks(ticks.tolist(), labels=[f"{tick:.3g}" for tick in ticks], minor=False)
        bar.minorticks_off()
    return figure


def scale(answers: Sequence[xr.Dataset], quantity: str = "loss") -> Normalize:
    """Colours from the least to the greatest finite value of all answers; logarithmic where all are positive."""
    values = np.concatenate([data[quantity].values[np.isfinite(data[quantity].values)] for data in answers])
    if not values.size:
        return Normalize(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if low == high:
        return Normalize(low, low + 1.0)
    return LogNorm(low, high) if low > 0 else Normalize(low, high)


def nice(low: float, high: float) -> np.ndarray:
    """Round numbers between two of less than two decades, not too many."""
    for within in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
        tuple(np.arange(10, 100) / 10),
    ):
        series = np.outer(10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1), within).ravel()
        found = series[(series >= low) & (series <= high)]
        if len(found) >= 3:
            return np.asarray(found[:: max(1, len(found) // 8)])
    return np.array([low, high])


def _mark(ax: Axes, x: np.ndarray, y: np.ndarray, where: np.ndarray, marker: str, color: str) -> None:
    rows, columns = np.nonzero(where)
    ax.plot(x[columns], y[rows], marker, color=color, markersize=1.4, markeredgewidth=0.5, alpha=0.8, linestyle="")

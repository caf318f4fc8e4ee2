"""Contours of the loss on a plane through the weights (Li et al. 2018, Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import Look, loss_units, plain
from landscape.plots.headlines import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import BoundaryNorm
    from matplotlib.figure import Figure

MEANING = (
    "The loss on a plane through the trained weights (cross), in steps that all panels share: wider contours "
    "mean a flatter minimum along these directions. Two directions out of millions show neither the whole "
    "valley nor its sharpest walls, and networks compare only under one protocol and one normalisation of the "
    "directions."
)


NBSP = "\u00a0"  # keeps units on one line where labels are broken
COLORS = "viridis"
HEIGHT_RADIUS = 0.5  # where the height of a surface is quoted
FEWEST = 3  # contours that a panel should have


def draw(data: xr.Dataset, ax: Axes, *, levels: np.ndarray | None = None) -> Axes:
    """Draw labelled contours of the loss; cells not measured yet stay grey, finished ones without a value have a dot.

    Args:
        data: a stored answer.
        ax: where to draw.
        levels: of the contours; default: from the data.
    """
    levels = steps([data]) if levels is None else levels
    x, y = data["x"].values, data["y"].values
    loss = data["loss"].transpose("y", "x").values
    ax.set_facecolor("0.88")
    shown = np.ma.masked_invalid(loss)
    # Under the contours, so that single finished cells show too.
    ax.pcolormesh(x, y, shown, cmap=COLORS, norm=_norm(levels), shading="nearest", rasterized=True)
    if cells(loss).any():
        ax.contourf(x, y, shown, levels=levels, cmap=COLORS, norm=_norm(levels), extend="both")
        within = levels[(levels > shown.min()) & (levels < shown.max())]
        if within.size:
            lines = ax.contour(x, y, shown, levels=within, colors="k", linewidths=0.35)
            ax.clabel(lines, levels=within[::2], fontsize=5, fmt="%.3g", inline_spacing=2)
    rows, columns = np.nonzero((data["done"].transpose("y", "x").values == 1) & ~np.isfinite(loss))
    ax.plot(x[columns], y[rows], ".", color="0.4", markersize=1.5, label="loss not finite")
    places(data, ax)
    ax.set(xlabel=axis_label(data, "x"), ylabel=axis_label(data, "y"), xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
    if 1 / 3 < np.ptp(x) / np.ptp(y) < 3:
        ax.set_aspect("equal")
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per answer with common contour levels and one colour bar."""
    from matplotlib.cm import ScalarMappable

    levels = steps(answers)
    lost = any((~np.isfinite(data["loss"].where(data["done"] == 1, 0.0).values)).any() for data in answers)
    note = "Dots: the loss is not finite." if lost else ""
    figure, axes = style.panels(answers, looks, aspect=0.8, share=False, note=note, bar=0.2 if alike(answers) else 0.35)
    for data, ax in zip(answers, axes, strict=True):
        draw(data, ax, levels=levels)
    style.outer(axes, alike=alike(answers))
    figure.colorbar(ScalarMappable(_norm(levels), COLORS), ax=axes, label=f"loss ({loss_units(answers)})",
                    aspect=30, pad=0.02, ticks=levels, format="%.3g", spacing="uniform", extend="both")  # fmt: skip
    return figure


def steps(answers: Sequence[xr.Dataset]) -> np.ndarray:
    """Contour levels that fit all answers: even, or steps like 1, 2, 5 where the loss spans orders of magnitude.

    Such steps too where even ones would leave a flat answer beside a steep one without contours. The upper end is a
    quantile: a few cells at the corners may be larger by orders of magnitude.
    """
    from matplotlib.ticker import MaxNLocator

    each = [data["loss"].values[np.isfinite(data["loss"].values)] for data in answers]
    values = np.concatenate(each)
    low, high = float(values.min()), float(np.quantile(values, 0.9))
    even = np.unique(MaxNLocator(12).tick_values(low, high if high > low else low + 1.0))
    crossed = [((even > found.min()) & (even < found.max())).sum() for found in each if found.size]
    if high <= 20 * max(low, 0.0) and (high <= 4 * low or min(crossed) >= FEWEST):
        return even
    low = max(low, 1e-3 * high)
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    within = (1.0, 2.0, 5.0) if high > 300 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    series = np.outer(10.0**decades, within).ravel()
    return np.asarray(series[np.searchsorted(series, low, "right") - 1 : np.searchsorted(series, high) + 1])


def cells(loss: np.ndarray) -> np.ndarray:
    """Which cells of the grid have all four corners."""
    known = np.isfinite(loss)
    return np.asarray(known[1:, 1:] & known[1:, :-1] & known[:-1, 1:] & known[:-1, :-1])


def _norm(levels: np.ndarray) -> BoundaryNorm:
    """One colour per step, however unequal the steps."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm

    return BoundaryNorm(levels, colormaps[COLORS].N, extend="both")


def places(data: xr.Dataset, ax: Axes) -> None:
    """The checkpoint itself at the origin; on a plane of a run the path of training, of checkpoints the others."""
    if "path_x" in data:
        along, across = data["path_x"].values, data["path_y"].values
        others = data.attrs.get("plane") == "checkpoints"
        ax.plot(along, across, color="w", marker="o", markersize=2, linewidth=0.0 if others else 0.8, clip_on=True)
        for i in range(len(along)) if others and "path_name" in data else ():
            named(ax, data, float(along[i]), float(across[i]), plain(str(data["path_name"].values[i])))
    ax.plot(0.0, 0.0, "+", color="w", markersize=5, markeredgewidth=1)


def named(ax: Axes, data: xr.Dataset, x: float, y: float, name: str) -> None:
    """A name beside a point, on the side where the axes have room for it."""
    from matplotlib import patheffects

    right = x > (data["x"].values[0] + data["x"].values[-1]) / 2
    ax.annotate(
        name, (x, y), xytext=(-3 if right else 3, 4), textcoords="offset points", ha="right" if right else "left",
        fontsize=5.5, color="w", path_effects=[patheffects.withStroke(linewidth=1.5, foreground="k")],
    )  # fmt: skip


def alike(answers: Sequence[xr.Dataset]) -> bool:
    """Whether all planes have the same axes."""
    return len({(axis_label(data, "x"), axis_label(data, "y")) for data in answers}) == 1


def axis_label(data: xr.Dataset, name: str) -> str:
    """Long name and units of a coordinate."""
    about = data[name].attrs
    units = plain(str(about.get("units", "1")))
    named = plain(str(about.get("long_name", name)))
    return named if units in ("1", "") else f"{named} ({units.replace(' ', NBSP)})"


def headline(data: xr.Dataset) -> Numbers:
    """Loss and accuracy at the centre, the mean rise of the loss at a radius, and what a fast mode costs."""
    found: Numbers = {}
    for name in ("loss", "accuracy"):
        if name in data and {"x", "y"} == set(data[name].dims):
            x, y = (np.flatnonzero(np.abs(data[axis].values) < 1e-9) for axis in ("x", "y"))
            if len(x) and len(y):
                found[name] = data[name].transpose("x", "y").values[x[0], y[0]].item()
    if "objective" in data and np.isfinite(data["objective"]).any():
        at = data["objective"].argmin(("x", "y"))
        where = ", ".join(f"{data[axis][at[axis]].item():g}" for axis in ("x", "y"))
        found |= {"least objective": data["objective"].min().item(), "at": f"({where})"}
    if "height" in data and HEIGHT_RADIUS in data["radius"]:
        found[f"height at {HEIGHT_RADIUS:g}"] = data["height"].sel(radius=HEIGHT_RADIUS).item()
    measures = {"hold_out_error": "hold-out error at most", "deviation_max": "deviation at most (standard errors)"}
    return found | {words: data[name].item() for name, words in measures.items() if name in data}

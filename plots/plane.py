"""Draw what the surface figures share: cells of the grid, axis labels, marked checkpoints, pages of panels."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, style, theme, tidy
from landscape.plots.figure import Axes, Draw, Figure, Look, Normalize

COLORS = "viridis"
VISIBLE, ABOVE = 2.0, 10.0  # of a vertical axis: times the rise of the flattest surface, and times the highest minimum
NBSP = "\u00a0"  # keeps units on one line where labels are broken


def draw_cells(ax: Axes, data: xr.Dataset, quantity: str, norm: Normalize) -> np.ma.MaskedArray[Any, Any]:
    """Draw one cell per grid point, grey without a finite value; returns the masked values, (y, x)."""
    shown = np.ma.masked_invalid(data[quantity].transpose("y", "x").values)
    ax.set_facecolor(theme.missing())
    ax.pcolormesh(data["x"].values, data["y"].values, shown, cmap=COLORS, norm=norm, shading="nearest", rasterized=True)
    return shown


def complete_cells(loss: np.ndarray) -> np.ndarray:
    """Which cells of the grid have a finite value at all four corners."""
    known = np.isfinite(loss)
    return np.asarray(known[1:, 1:] & known[1:, :-1] & known[:-1, 1:] & known[:-1, :-1])


def say_too_few_points(ax: Any) -> None:
    """Write on three-dimensional axes why they are empty."""
    ax.text2D(0.5, 0.5, "too few points yet", transform=ax.transAxes, ha="center", color=theme.muted())


def label_axes(data: xr.Dataset, ax: Axes, *, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    """Labels and limits; equal scales unless the plane is much longer one way, or has one point along an axis."""
    ax.set(xlabel=axis_label(data, "x"), ylabel=axis_label(data, "y"), xlim=_apart(xlim), ylim=_apart(ylim))
    wide, high = (float(np.ptp(data[axis].values)) for axis in "xy")
    if high < 3 * wide < 9 * high:
        ax.set_aspect("equal")


def _apart(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits of an axis, around the one point where there is only one."""
    low, high = limits
    return (low, high) if low != high else (low - 0.5, high + 0.5)


def axis_label(data: xr.Dataset, name: str) -> str:
    """Long name and units of a coordinate."""
    about = data[name].attrs
    units = appearance.escaped(str(about.get("units", "1")))
    long_name = appearance.escaped(str(about.get("long_name", name)))
    return long_name if units in ("1", "") else f"{long_name} ({units.replace(' ', NBSP)})"


def mark_checkpoints(data: xr.Dataset, ax: Axes) -> None:
    """The checkpoint at the origin; on the plane of a run its path, on one through checkpoints the others by name."""
    if "path_x" in data:
        x, y = data["path_x"].values, data["path_y"].values
        others = data.attrs.get("plane") == "checkpoints"
        ax.plot(x, y, color="w", marker="o", markersize=2, linewidth=0.0 if others else 0.8, clip_on=True)
        for i in range(len(x)) if others and "path_name" in data else ():
            annotate(ax, data, float(x[i]), float(y[i]), appearance.escaped(str(data["path_name"].values[i])))
    ax.plot(0.0, 0.0, "+", color="w", markersize=5, markeredgewidth=1)


def annotate(ax: Axes, data: xr.Dataset, x: float, y: float, name: str) -> None:
    """A name beside a point, on the side where the axes have more room; left out where it would cover one before."""
    from matplotlib import patheffects

    right = x > (data["x"].values[0] + data["x"].values[-1]) / 2
    ax.annotate(
        name, (x, y), xytext=(-3 if right else 3, 4), textcoords="offset points", ha="right" if right else "left",
        fontsize=6, color="w", path_effects=[patheffects.withStroke(linewidth=1.5, foreground="k")],
        gid=tidy.CROWDED,
    )  # fmt: skip


def page_of_maps(
    results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, note: str = ""
) -> tuple[Figure, list[Axes]]:
    """One map per result with room for a colour bar; axis labels only on the outside where all share them."""
    alike = len({(axis_label(data, "x"), axis_label(data, "y")) for data in results}) == 1
    figure, axes = style.panels(results, looks, aspect=0.8, share=False, note=note, bar=0.2 if alike else 0.35)
    for data, ax in zip(results, axes, strict=True):
        draw(data, ax)
    style.label_outer(axes, same=alike)
    return figure, axes


def page_3d(results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, *, aspect: float, note: str) -> Figure:
    """One three-dimensional panel per result."""
    figure, axes = style.panels(results, looks, aspect=aspect, share=False, projection="3d", note=note)
    for data, ax in zip(results, axes, strict=True):
        draw(data, ax)
    return figure


def vertical_range(results: Sequence[xr.Dataset], share: float) -> tuple[float, float]:
    """A common range from the lowest loss to one that this share of every result's finite cells stay below."""
    values = [data["loss"].values[np.isfinite(data["loss"].values)] for data in results]
    low = min(float(v.min()) for v in values)
    high = max(float(np.quantile(v, share)) for v in values)
    return low, high if high > low else low + 1.0


def bowl_range(results: Sequence[xr.Dataset], share: float) -> tuple[float, float]:
    """The common range, capped so that the bowl of every surface is visible.

    It ends at `VISIBLE` times the rise of the flattest surface or, if that is higher, `ABOVE` times the highest of
    their minima: without the cap, one network whose losses overflow would make flat sheets of all others. Rises are
    those of the logarithm where all losses are positive.
    """
    low, high = vertical_range(results, share)
    ends = [vertical_range([data], share) for data in results]
    if low <= 0:
        rise = min(top - bottom for bottom, top in ends)
        return low, min(high, max(low + VISIBLE * rise, max(bottom for bottom, _ in ends) + rise))
    rise = min(math.log(top / bottom) for bottom, top in ends)
    cap = max(math.log(low) + VISIBLE * rise, math.log(ABOVE * max(bottom for bottom, _ in ends)))
    return low, high if cap >= math.log(high) else math.exp(cap)

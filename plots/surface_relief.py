"""The loss surface in three dimensions with axes that can be read: logarithmic heights, contours on the floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from landscape.plots import style
from landscape.plots.appearance import Look, loss_units
from landscape.plots.surface import axis_label, cells
from landscape.plots.surface_heat import nice

MEANING = (
    "The same losses as in the contours, as a relief on a logarithmic vertical axis, with contours on its floor and "
    "one scale for all panels. Slopes here are relative changes of the loss, so a steep wall near the floor may be a "
    "small step of the loss."
)
COLORS = matplotlib.colormaps["viridis"]


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw log10 of the loss over the plane as a shaded relief with a labelled box.

    Args:
        data: a stored answer.
        ax: three-dimensional axes.
        span: losses at floor and ceiling; default: from the data.
    """
    low, high = span or heights([data])
    logarithmic = low > 0
    loss = data["loss"].transpose("y", "x").values
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.isfinite(loss), np.log10(loss) if logarithmic else loss, np.nan)
    bottom, top = (np.log10(low), np.log10(high)) if logarithmic else (low, high)
    z = np.where(z <= top, z, np.nan)
    floor = bottom - 0.25 * (top - bottom)
    norm = Normalize(bottom, top)
    x, y = np.meshgrid(data["x"].values, data["y"].values)
    ax.plot_surface(
        x, y, z, rcount=80, ccount=80, facecolors=COLORS(norm(np.nan_to_num(z, nan=top))), linewidth=0, shade=True,
        rasterized=True,
    )  # fmt: skip
    if cells(z).any():
        ax.contourf(
            x, y, np.ma.masked_invalid(z), np.linspace(bottom, top, 13), zdir="z", offset=floor, cmap=COLORS, norm=norm
        )
    else:
        ax.text2D(0.5, 0.5, "too few points yet", transform=ax.transAxes, ha="center", color="0.5")
    ax.set_zlim(floor, top)
    if logarithmic:
        ticks = nice(low, high)
        ax.set_zticks(np.log10(ticks), [f"{tick:.3g}" for tick in ticks])
    ax.view_init(elev=28, azim=-60)
    ax.set_box_aspect((1, 1, 0.75), zoom=0.9)
    ax.tick_params(labelsize=5, pad=-3)
    for axis, values in ((ax.xaxis, data["x"].values), (ax.yaxis, data["y"].values)):
        ticks = np.linspace(values[0], values[-1], 3)
        axis.set_ticks(ticks, [f"{tick:.3g}" for tick in ticks])
    ax.set_xlabel("x", fontsize=6, labelpad=-9)
    ax.set_ylabel("y", fontsize=6, labelpad=-9)
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One relief per answer on a common vertical scale."""
    span = heights(answers)
    named = "; ".join(dict.fromkeys(f"x: {axis_label(d, 'x')}, y: {axis_label(d, 'y')}" for d in answers))
    note = f"Upwards: loss ({loss_units(answers)}), up to {span[1]:.3g}; {named}."
    figure, axes = style.panels(answers, looks, aspect=0.9, share=False, projection="3d", note=note)
    for data, ax in zip(answers, axes, strict=True):
        draw(data, ax, span=span)
    return figure


def heights(answers: Sequence[xr.Dataset]) -> tuple[float, float]:
    """A common vertical range: from the lowest loss to one that nearly all cells of every answer stay below."""
    values = [data["loss"].values[np.isfinite(data["loss"].values)] for data in answers]
    low = min(float(v.min()) for v in values)
    high = max(float(np.quantile(v, 0.98)) for v in values)
    return low, high if high > low else low + 1.0

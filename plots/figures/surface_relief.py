"""Draw the loss surface in three dimensions with labelled axes: logarithmic heights, contours on the floor."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.colors import Normalize

from landscape.plots import plane
from landscape.plots.appearance import loss_label
from landscape.plots.figure import Figure, Look
from landscape.plots.figures.surface_heat import round_ticks

MEANING = (
    "The same losses as in the contours, as a relief on a logarithmic vertical axis, with contours on its floor and "
    "one scale for all panels. Slopes here are relative changes of the loss, so a steep wall near the floor may be a "
    "small step of the loss."
)
COLORS = matplotlib.colormaps[plane.COLORS]
APART = 0.14  # share of the vertical axis between two labels at least
SHARE = 0.98  # of the cells that are below the upper end of the vertical axis
VISIBLE = 3.0  # times the height of the flattest surface, which the vertical axis is at most


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw log10 of the loss over the plane, from floor to ceiling, as a shaded relief with a labelled box."""
    low, high = span or plane.vertical_range([data], SHARE)
    logarithmic = low > 0
    loss = data["loss"].transpose("y", "x").values
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.isfinite(loss), np.log10(loss) if logarithmic else loss, np.nan)
    bottom, top = (np.log10(low), np.log10(high)) if logarithmic else (low, high)
    z = np.where(z <= top, z, np.nan)
    floor = bottom - 0.25 * (top - bottom)
    norm = Normalize(bottom, top)
    x, y = np.meshgrid(data["x"].values, data["y"].values)
    colors = COLORS(norm(np.nan_to_num(z, nan=top)))
    ax.plot_surface(
        x, y, z, rcount=80, ccount=80, facecolors=colors, linewidth=0, antialiased=False, shade=True, rasterized=True
    )
    if plane.complete_cells(z).any():
        steps = np.linspace(bottom, top, 13)
        ax.contourf(x, y, np.ma.masked_invalid(z), steps, zdir="z", offset=floor, cmap=COLORS, norm=norm)
    else:
        plane.say_too_few_points(ax)
    ax.set_zlim(floor, top)
    if logarithmic:
        ticks = apart(round_ticks(low, high), top - floor)
        ax.set_zticks(np.log10(ticks), [f"{tick:.3g}" for tick in ticks])
    ax.view_init(elev=28, azim=-60)
    ax.set_box_aspect((1, 1, 0.75), zoom=0.9)
    ax.tick_params(labelsize=6, pad=-3)
    for axis, values in ((ax.xaxis, data["x"].values), (ax.yaxis, data["y"].values)):
        ticks = np.linspace(values[0], values[-1], 3)
        axis.set_ticks(ticks, [f"{tick:.3g}" for tick in ticks])
    ax.set_xlabel("x", fontsize=6, labelpad=-9)
    ax.set_ylabel("y", fontsize=6, labelpad=-9)
    return ax


def span_of(results: Sequence[xr.Dataset]) -> tuple[float, float]:
    """The ends of a common vertical axis, capped so that the flattest surface takes a third of it.

    Without the cap, one network whose losses overflow would make flat sheets of all others.
    """
    low, high = plane.vertical_range(results, SHARE)
    tops = [plane.vertical_range([data], SHARE)[1] for data in results]
    if low > 0:
        return low, min(high, low * (min(tops) / low) ** VISIBLE) if min(tops) > low else high
    return low, min(high, low + VISIBLE * (min(tops) - low)) if min(tops) > low else high


def apart(ticks: np.ndarray, span: float) -> np.ndarray:
    """The ticks of a logarithmic axis over `span` decades whose labels do not touch, the decades first."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: (abs(np.log10(t) - round(np.log10(t))) > 1e-9, t)):
        if all(abs(np.log10(tick / other)) > APART * span for other in kept):
            kept.append(float(tick))
    return np.array(sorted(kept))


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One relief per result on a common vertical scale."""
    span = span_of(results)
    axes = "; ".join(dict.fromkeys(f"x: {plane.axis_label(d, 'x')}, y: {plane.axis_label(d, 'y')}" for d in results))
    note = f"Upwards: {loss_label(results)}, up to {span[1]:.3g}; {axes}."
    return plane.page_3d(results, looks, partial(draw, span=span), aspect=0.9, note=note)

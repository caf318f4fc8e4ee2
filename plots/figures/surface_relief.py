"""Draw the loss surface in three dimensions, smooth, with labelled axes and contours on the floor."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, plane
from landscape.plots.figure import Figure, Look
from landscape.plots.tidy import round_ticks

MEANING = (
    "The same losses as in the contours, as a relief on a logarithmic vertical axis, with contours on its floor and "
    "one scale for all panels. Slopes here are relative changes of the loss, so a steep wall near the floor may be a "
    "small step of the loss."
)
APART = 0.14  # share of the vertical axis between two labels at least
SHARE = 0.98  # of the cells that are below the upper end of the vertical axis
FINE = 60  # cells per axis that a relief is drawn with


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw log10 of the loss over the plane, from floor to ceiling, as a shaded relief with a labelled box."""
    import matplotlib
    from matplotlib.colors import Normalize

    low, high = span or plane.vertical_range([data], SHARE)
    logarithmic = low > 0
    data = smooth(data, (low, high))
    loss = data["loss"].transpose("y", "x").values
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(np.isfinite(loss), np.log10(loss) if logarithmic else loss, np.nan)
    bottom, top = (np.log10(low), np.log10(high)) if logarithmic else (low, high)
    z = np.where(z <= top, z, np.nan)
    floor = bottom - 0.25 * (top - bottom)
    norm = Normalize(bottom, top)
    x, y = np.meshgrid(data["x"].values, data["y"].values)
    colors = matplotlib.colormaps[plane.COLORS](norm(np.nan_to_num(z, nan=top)))
    ax.plot_surface(
        x, y, z, rcount=FINE, ccount=FINE, facecolors=colors, linewidth=0, antialiased=False, shade=True,
        rasterized=True,
    )  # fmt: skip
    if plane.complete_cells(z).any():
        steps = np.linspace(bottom, top, 13)
        ax.contourf(x, y, np.ma.masked_invalid(z), steps, zdir="z", offset=floor, cmap=plane.COLORS, norm=norm)
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


def smooth(data: xr.Dataset, span: tuple[float, float]) -> xr.Dataset:
    """A surface on a finer grid; as it is where points are missing or few.

    A cubic spline of log losses (of losses, where the span reaches zero) through the measured points. Losses far above
    the span count as a little above it, so that an overflow does not bend the surface below.
    """
    from scipy.interpolate import RectBivariateSpline

    x, y = data["x"].values, data["y"].values
    low, high = span
    loss = data["loss"].transpose("x", "y").values
    least = 4  # points of a cubic spline
    if np.isnan(loss).any() or min(len(x), len(y)) < least:
        return data
    most = high * high / low if low > 0 else 2 * high - low
    heights = np.clip(loss, low, most)
    heights = np.log(heights) if low > 0 else heights
    fine = [np.linspace(axis[0], axis[-1], max(FINE + 1, len(axis))) for axis in (x, y)]
    found = np.clip(RectBivariateSpline(x, y, heights)(*fine), heights.min(), heights.max())
    found = np.exp(found) if low > 0 else found
    return xr.Dataset({"loss": (("x", "y"), found)}, coords=dict(zip("xy", fine, strict=True)))


def scale(results: Sequence[xr.Dataset], span: tuple[float, float]) -> str:
    """What the vertical axis is, for the caption."""
    kind = ", logarithmic" if span[0] > 0 else ""
    return f"Upwards: {appearance.loss_label(results)}{kind}, cut at {span[1]:.3g}; smooth between the measured points."


def apart(ticks: np.ndarray, span: float) -> np.ndarray:
    """The ticks of a logarithmic axis over `span` decades whose labels do not touch, the decades first."""
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: (abs(np.log10(t) - round(np.log10(t))) > 1e-9, t)):
        if all(abs(np.log10(tick / other)) > APART * span for other in kept):
            kept.append(float(tick))
    return np.array(sorted(kept))


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One relief per result on a common vertical scale."""
    span = plane.bowl_range(results, SHARE)
    axes = "; ".join(dict.fromkeys(f"x: {plane.axis_label(d, 'x')}, y: {plane.axis_label(d, 'y')}" for d in results))
    note = f"{scale(results, span)} {axes}."
    return plane.page_3d(results, looks, partial(draw, span=span), aspect=0.9, note=note)

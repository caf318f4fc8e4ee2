"""Draw the trajectory of training, polar and on its principal plane (Park & Kim 2022, Fig. 1b; Li et al. 2018)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.options import counted
from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Snapshots of one training run, seen from its final weights: their distance and angle relative to the "
    "start, and their place on the plane that holds most of the path. The polar figure is easy to misread: in "
    "high dimension nearly every path turns by large angles, and much of it lies off any plane, as the "
    "explained variance and the distances say."
)


def draw(data: xr.Dataset, axes: tuple[Axes, Axes], *, look: Look) -> tuple[Axes, Axes]:
    """Draw the trajectory on polar axes (first) and on its principal plane (second); a star marks the final weights."""
    polar, plane = axes
    draw_polar(data, polar, look)
    _path(plane, data["pc1"].values, data["pc2"].values, look)
    plane.set(xlabel="first principal coordinate", ylabel="second principal coordinate")
    return axes


def draw_polar(data: xr.Dataset, polar: Axes, look: Look) -> Axes:
    """Draw distance and angle relative to the final weights on polar axes, a quarter of a circle where all fit."""
    angle, radius = (np.where(np.isfinite(data[name]), data[name], np.nan) for name in ("angle", "radius"))
    # The final weights have no angle: they lie at the centre. Take the last angle there is.
    known = angle[np.isfinite(angle)]
    angle = np.where(np.isfinite(radius) & np.isnan(angle), known[-1] if known.size else 0.0, angle)
    _path(polar, angle, radius, look)
    widest = np.nanmax([0.0, *np.concatenate([np.asarray(line.get_xdata(), float) for line in polar.lines])])
    polar.set_thetamin(0)  # type: ignore[attr-defined]
    polar.set_thetamax(180 if widest > np.pi / 2 else 90)  # type: ignore[attr-defined]
    polar.set_xlabel("distance to the final weights, start = 1", labelpad=15)
    return polar


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid, each on its own principal plane; explained variance and distance off it in the legend."""
    pairs = list(zip(results, looks, strict=True))
    legend = [replace(look, label=f"{look.label}: {_numbers(data)}") for data, look in pairs]
    note = "Stars: final weights. Each run has its own principal plane. Polar figures are easy to misread."
    figure = style.page(results, looks, height=2.6, legend=legend, note=note)
    polar = figure.add_subplot(1, 2, 1, projection="polar")
    plane = figure.add_subplot(1, 2, 2)
    for data, look in pairs:
        draw(data, (polar, plane), look=look)
    polar.set_title("distance and angle, seen from the end")
    plane.set_title("principal plane")
    if not any(np.isfinite(data["pc1"].values).any() for data in results):
        style.write_centred(plane, "after the last snapshot")
    return figure


def _path(ax: Axes, x: np.ndarray, y: np.ndarray, look: Look) -> None:
    curve: dict[str, Any] = {"color": look.color, "marker": look.marker, "linestyle": look.line, "label": look.label}
    ax.plot(x, y, markersize=2.5, linewidth=1, **curve)
    ax.plot(x[-1:], y[-1:], color=look.color, marker="*", markersize=7, linestyle="none", clip_on=False)


def _numbers(data: xr.Dataset) -> str:
    if "explained_variance" not in data or not np.isfinite(data["explained_variance"].values).all():
        done = int(np.isfinite(data["radius"].values).sum())
        return f"{done} of {counted(data.sizes['snapshot'], 'snapshot')}"
    shares = " + ".join(f"{100 * share:.0f}" for share in data["explained_variance"].values)
    return f"{shares} % of the variance, off plane by up to {np.nanmax(data['off_plane'].values):.2g}"

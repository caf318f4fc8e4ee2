"""Draw the loss on the principal plane of a run beside the snapshots' own, and their distances from the plane."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import half_width

MEANING = (
    "The loss of every snapshot (solid) beside the loss at the point of the principal plane where a figure of the "
    "path shows it (dashed), and the distance between the two points in weight space. Where the lines part, the "
    "surface under a drawn path is not the surface that training saw, and its hills and valleys there mean little."
)


def draw(data: xr.Dataset, axes: tuple[Axes, Axes], *, look: Look) -> tuple[Axes, Axes]:
    """Draw both losses with bands over the epochs (first axes), and the distances off the plane (second)."""
    time, unit = epochs(data)
    for name, line in (("loss", "-"), ("plane_loss", "--")):
        value, half = data[name].values, half_width(data, name)
        axes[0].plot(time, value, color=look.color, linestyle=line, marker=look.marker, markersize=2.5, linewidth=1)
        low, high = value - half, value + half
        if np.isfinite(high).any():
            axes[0].fill_between(time, low, high, color=look.color, alpha=0.15, linewidth=0)
    axes[1].plot(time, data["off_plane"], color=look.color, marker=look.marker, markersize=2.5, linewidth=1)
    for ax in axes:
        style.whole_numbers(ax)
    axes[0].set(xlabel=unit, ylabel=appearance.loss_label([data]))
    axes[1].set(xlabel=unit, ylabel="distance (norm of weights)")
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    legend = [replace(look, line="-") for look in looks]
    note = "Solid: the snapshots' own loss; dashed: on the plane. Bands: 95 % intervals over samples."
    figure = style.page(results, looks, height=2.3, legend=legend, note=note)
    own, off = figure.subplots(1, 2)
    for data, look in zip(results, looks, strict=True):
        draw(data, (own, off), look=look)
    losses = np.concatenate([data[name].values for data in results for name in ("loss", "plane_loss")])
    style.log_if_wide(own, losses)
    own.set_title("loss of the snapshots and of the plane")
    off.set_title("distance of the snapshots from the plane")
    if not any(np.isfinite(data["off_plane"].values).any() for data in results):
        style.write_centred(off, "after the last snapshot")
    return figure


def epochs(data: xr.Dataset) -> tuple[np.ndarray, str]:
    """Horizontal coordinates of the snapshots: their epochs if all are known, else their order; and the label."""
    time = data["epoch"].values if "epoch" in data else np.array([np.nan])
    known = bool(np.isfinite(time).all())
    return (time, "epoch") if known else (np.arange(data.sizes["snapshot"]), "snapshot")

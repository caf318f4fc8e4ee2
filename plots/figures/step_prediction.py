"""Draw the change of the objective that an update was predicted to make against the one that it makes."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Whether a quadratic model of the loss predicts what the optimiser's update does: on the identity line it does, "
    "above it the update lowers the loss less than predicted, or raises it; open marks are mini-batches that the "
    "update was not made for. One step from one point is compared, not the course of a training."
)
COLUMNS = 3


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the actual over the predicted change, to second order, of every mini-batch, with the identity line."""
    for prefix, face in (("", look.color), ("other_", theme.ground())):
        predicted, actual = (
            data[f"{prefix}{name}"].where(data["done"] == 1).values for name in ("predicted_change", "actual_change")
        )
        ax.plot(
            predicted, actual, linestyle="none", marker=look.marker, markersize=4, color=look.color,
            markerfacecolor=face, label=None if prefix else look.label,
        )  # fmt: skip
    ax.axline((0, 0), slope=1, color=theme.muted(), linewidth=0.8, linestyle="--", zorder=0)
    units = str(data["actual_change"].attrs.get("units", ""))
    ax.set(xlabel=f"predicted change ({units})", ylabel=f"actual change ({units})")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A square panel of equal axes per result: changes of two learning rates may be decades apart."""
    columns = 2 if theme.narrow() else min(COLUMNS, max(2, len(results)))
    side = theme.page_width() / columns
    note = (
        "Predicted to second order. Dashed: identity. Filled: on the mini-batch of the gradient; open: mean of others."
    )
    figure, axes = style.beside(results, looks, len(results), height=0.95 * side, columns=columns, note=note)
    for ax, data, look in zip(axes, results, looks, strict=True):
        draw(data, ax, look=look)
        names = [f"{prefix}{name}" for prefix in ("", "other_") for name in ("predicted_change", "actual_change")]
        found = np.concatenate([data[name].where(data["done"] == 1).values for name in names])
        found = found[np.isfinite(found)]
        if len(found):
            low, high = min(found.min(), 0.0), max(found.max(), 0.0)
            margin = 0.06 * (high - low) or 1.0
            ax.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
        ax.set_box_aspect(1)
        ax.locator_params(nbins=4)
        for axis in (ax.xaxis, ax.yaxis):  # no common factor beside the label
            axis.set_major_formatter("{x:.4g}")
        for line in (ax.axhline, ax.axvline):
            line(0.0, color=theme.muted(), linewidth=0.4, zorder=0)
        size = style.title_size(columns)
        ax.set_title(style.fitted(look.label, 0.75 * side, size), fontsize=size)
    style.label_outer(axes)
    return figure

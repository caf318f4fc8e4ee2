"""Draw loss and accuracy between two checkpoints before and after the second one's units are permuted to match."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import LINES, escaped, look_of, loss_label
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.line import band
from landscape.statistics.rounding import plus_minus
from landscape.statistics.stored import half_width

MEANING = (
    "Loss and accuracy on the straight line from one checkpoint to another, whose units are permuted or not: a "
    "permutation leaves the network's function as it is, so a barrier that it removes was one of naming the units. The "
    "search finds a good permutation, not the best: a barrier that is left does not show that none removes it."
)


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look | None = None) -> tuple[Axes, ...]:
    """Draw the loss (first axes) and the accuracy (second, if any) of every curve, bands of 95 % intervals."""
    look = look or look_of(data)
    for ax, name in zip(axes, ("loss", "accuracy"), strict=False):
        values = data[name].where((data["done"] == 1) & np.isfinite(data[name])).transpose("curve", "t").values
        halves = half_width(data.transpose("curve", "t", ...), name)
        for k, (value, half) in enumerate(zip(values, halves, strict=True)):
            band(ax, data["t"].values, value, half, look, LINES[k % len(LINES)])
        if not np.isfinite(values).any():
            text = str(data[name].attrs.get("long_name", name)).replace(": ", ":\n")
            style.write_centred(ax, text, va="center", fontsize=7, wrap=True)
        ax.set(xlabel="position on the line (share of the way)", ylabel=loss_label([data]) if name == "loss" else name)
        ax.locator_params(axis="x", nbins=6)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per pair of checkpoints: the loss on the left, the accuracy on the right if defined."""
    entries = [
        Look(
            f"{look.label} to {escaped(str(data.attrs.get('other', '')))}: {_curve(data, k)}",
            look.color,
            "",
            LINES[k % len(LINES)],
        )
        for data, look in zip(results, looks, strict=True)
        for k in range(data.sizes["curve"])
    ]
    note = "Bands: 95 % intervals over samples."
    figure = style.page(results, looks, height=2.1 * len(results), legend=entries, note=note)
    defined = any(data["accuracy"].attrs.get("units") != "undefined" for data in results)
    grid = figure.subplots(len(results), 2 if defined else 1, squeeze=False)
    for axes, data, look in zip(grid, results, looks, strict=True):
        draw(data, tuple(axes), look=look)
        style.log_if_wide(axes[0], data["loss"].values[data["done"].values == 1])
        for ax in axes[1:]:
            ax.set_ylim(-0.03, 1.03)
    return figure


def _curve(data: xr.Dataset, k: int) -> str:
    name = escaped(str(data["name"].values[k]))
    height, half = data["barrier"].values[k], half_width(data, "barrier")[k]
    if not np.isfinite(height):
        return name
    return f"{name}, barrier {plus_minus(height, half)}"

"""Draw loss and accuracy between two checkpoints before and after the second one's units are permuted to match."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.line import draw_curves
from landscape.plots.theme import ink, narrow, page_width
from landscape.statistics import rounding, stored

MEANING = (
    "Loss and accuracy on the straight line from one checkpoint to another, whose units are permuted or not: a "
    "permutation leaves the network's function as it is, so a barrier that it removes was one of naming the units. The "
    "search finds a good permutation, not the best: a barrier that is left does not show that none removes it."
)


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look) -> tuple[Axes, ...]:
    """Draw the loss (first axes) and the accuracy (second, if any) of every curve, bands of 95 % intervals."""
    from matplotlib.lines import Line2D

    draw_curves(data, axes, look, appearance.LINES, "curve", "position (share of the way)")
    lines = [
        Line2D([], [], color=look.color, linestyle=appearance.LINES[k % len(appearance.LINES)], label=_barrier(data, k))
        for k in range(data.sizes["curve"])
    ]
    known = [line for line in lines if line.get_label()]
    style.log_if_wide(axes[0], data["loss"].values[data["done"].values == 1])
    if known:
        columns = 1 if narrow() else 2
        style.add_headroom(axes[0], 1.5 if narrow() else 0.6)
        axes[0].legend(
            handles=known, fontsize=style.SMALL, ncols=columns, loc="upper left", frameon=False, handlelength=2.4,
            title=f"barrier ({data['barrier'].attrs.get('units', '1')})", title_fontsize=style.SMALL, alignment="left",
        )  # fmt: skip
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per pair of checkpoints: the loss and its barriers on the left, the accuracy if defined on the right."""
    names = list(dict.fromkeys(appearance.escaped(str(name)) for data in results for name in data["name"].values))
    legend = [Look(name, ink(), "", appearance.LINES[k % len(appearance.LINES)]) for k, name in enumerate(names)]
    note = "In the panels the barriers, with 95 % intervals. Bands: 95 % intervals over samples."
    figure = style.page(results, looks, height=2.1 * len(results), legend=legend, note=note)
    defined = any(data["accuracy"].attrs.get("units") != "undefined" for data in results)
    grid = figure.subplots(len(results), 2 if defined else 1, squeeze=False)
    for axes, data, look in zip(grid, results, looks, strict=True):
        draw(data, tuple(axes), look=look)
        other = appearance.escaped(str(data.attrs.get("other", "")))
        axes[0].set_title(style.fitted(f"{look.label} to {other}", page_width() / len(axes), 7), fontsize=7, loc="left")
        for ax in axes[1:]:
            ax.set_ylim(-0.03, 1.03)
    for ax in grid[:-1].flat:
        ax.set_xlabel("")
    return figure


def _barrier(data: xr.Dataset, k: int) -> str:
    """The barrier of a curve with its 95 % interval; "" where it is not known."""
    height, half = data["barrier"].values[k], stored.half_width(data, "barrier")[k]
    known = rounding.plus_minus(height, half) if np.isfinite(half) else f"{height:.3g}"
    return known if np.isfinite(height) else ""

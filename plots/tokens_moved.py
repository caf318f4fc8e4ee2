"""Draw an image's tokens before and after self-attention on three principal axes (Park et al. 2023, 2305.00729)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import Look
from landscape.plots.theme import page_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEANING = (
    "Tokens of one image in the residual stream before and after a layer of self-attention, on the first three "
    "principal axes of both: where the cloud moves as a whole, attention adds the same to all tokens; where it changes "
    "its form, attention treats them differently. Three axes hold a part of the variance only, and one image is one "
    "example; the common share of the displacement is of all channels, mean over images."
)
COLORS, NAMES = ("tab:blue", "tab:red"), ("before attention", "after attention")


def draw(data: xr.Dataset, ax: Any, *, layer: int = -1, image: int = 0) -> Any:
    """Draw the tokens of one image around one layer, by default the last; axes without numbers."""
    position = data["stream_position"].transpose("layer", "side", "image", "token", "axis").values[layer, :, image]
    for tokens, color in zip(position, COLORS, strict=True):
        shown = tokens[np.isfinite(tokens).all(axis=1)]
        ax.scatter(*shown.T, s=5, color=color, linewidths=0, alpha=0.8, depthshade=False)
    ax.set(xticklabels=[], yticklabels=[], zticklabels=[])
    depth, common = (float(data[name].values[layer]) for name in ("depth", "common"))
    ax.set_title(f"depth {depth:.2f}, common {common:.2f}", fontsize=style.SMALL)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per network, a column per layer."""
    from matplotlib.lines import Line2D

    columns = max(len(data["layer"]) for data in results)
    side = page_width() / max(columns, 3)
    legend: list[Any] = [
        Line2D([], [], color=color, marker="o", markersize=3, linestyle="none", label=name)
        for color, name in zip(COLORS, NAMES, strict=True)
    ]
    note = (
        "Tokens of the first image; common: share of the displacement that all tokens have in common, mean over images."
    )
    figure = style.page(results, looks, height=len(results) * (side + 0.25), legend=legend, note=note)
    grid = figure.subplots(len(results), columns, squeeze=False, subplot_kw={"projection": "3d"})
    for data, look, row in zip(results, looks, grid, strict=True):
        for layer, ax in enumerate(row):
            if layer < len(data["layer"]):
                draw(data, ax, layer=layer)
            else:
                ax.remove()
        row[0].text2D(0.0, 0.5, style.fitted(look.label, side, style.SMALL), transform=row[0].transAxes,
                      fontsize=style.SMALL, rotation=90, va="center", ha="right")  # fmt: skip
    return figure

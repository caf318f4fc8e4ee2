"""Draw an image's tokens before and after self-attention on three principal axes (Park et al. 2023, 2305.00729)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Figure, Look
from landscape.plots.figures.tokens import layers_in_rows

MEANING = (
    "Tokens of one image in the residual stream before and after a layer of self-attention, on the first three "
    "principal axes of both: where the cloud moves as a whole, attention adds the same to all tokens; where it changes "
    "its form, attention treats them differently. Three axes hold a part of the variance only, and one image is one "
    "example; the common share of the displacement is of all channels, mean over images."
)
COLORS, NAMES = ("tab:blue", "tab:red"), ("before attention", "after attention")
MARKERS = "o^"


def draw(data: xr.Dataset, ax: Any, *, layer: int = -1, image: int = 0) -> Any:
    """Draw the tokens of one image around one layer, by default the last; axes without numbers."""
    position = data["stream_position"].transpose("layer", "side", "image", "token", "axis").values[layer, :, image]
    moves = np.stack([*position, np.full_like(position[0], np.nan)], axis=1)  # (token, ends and a gap, axis)
    ax.plot(*moves.reshape(-1, position.shape[-1]).T, color=theme.muted(), linewidth=0.4)
    for tokens, color, marker in zip(position, COLORS, MARKERS, strict=True):
        shown = tokens[np.isfinite(tokens).all(axis=1)]
        ax.scatter(*shown.T, s=7, color=color, marker=marker, linewidths=0, alpha=0.8, depthshade=False)
    ax.set(xticklabels=[], yticklabels=[], zticklabels=[])
    depth, common = (float(data[name].values[layer]) for name in ("depth", "common"))
    ax.set_title(f"depth {depth:.2f}, common {common:.2f}", fontsize=style.SMALL)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per network, a column per layer."""
    legend = [Look(*entry, line=" ") for entry in zip(NAMES, COLORS, MARKERS, strict=True)]
    note = (
        "Lines join places of one token, of the first image; common: share of the displacement that all tokens have in "
        "common, mean over images."
    )
    return layers_in_rows(results, looks, draw, titles=0.25, projection="3d", note=note, legend=legend)

"""Draw the singular values of token and image representations after every self-attention (Park et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import depth, style
from landscape.plots.appearance import Look
from landscape.plots.figure import Axes, Figure

MEANING = (
    "Singular values of the tokens of one image and of the token means of a mini-batch, relative to the largest, from "
    "the first self-attention (dark) to the last (bright): a steep line means that few directions carry the "
    "representation. The number of tokens, channels and images bounds the rank, so compare networks where these agree."
)
PANELS = {"token_singular_value": "tokens of an image", "image_singular_value": "images of a mini-batch"}
LOWEST = -12.0  # nats relative to the largest; below, single precision leaves only rounding


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "token_singular_value") -> Axes:
    """Draw one line per self-attention over the rank, coloured from shallow to deep."""
    for layer_depth, values in zip(data["depth"].values, data[quantity].values, strict=True):
        shown = np.isfinite(values) & (values > LOWEST)
        rank = np.flatnonzero(shown) + 1
        ax.plot(rank, values[shown], color=depth.color(float(layer_depth)), linewidth=0.9)
    ax.set(xlabel="rank", ylabel="ln σ / σ\u2081", xscale="log")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Tokens above, images below, a column per network."""
    columns = len(results)
    width = style.COLUMN if columns == 1 else style.PAGE
    figure = style.page(results, looks, height=3.4, width=width)
    grid = figure.subplots(2, columns, sharey="row", squeeze=False)
    for column, (data, look) in enumerate(zip(results, looks, strict=True)):
        for ax, (quantity, what) in zip(grid[:, column], PANELS.items(), strict=True):
            draw(data, ax, quantity=quantity)
            if column:
                ax.set_ylabel("")
            ax.set_title(what, fontsize=style.SMALL, loc="right")
        grid[0, column].set_title(style.fitted(look.label, width / columns / 2, 7), loc="left", fontsize=7)
    depth.color_bar(figure, grid, aspect=40)
    return figure

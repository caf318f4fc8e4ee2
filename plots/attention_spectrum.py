"""Singular values of token and image representations after every self-attention (Park et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure

from landscape.plots import style
from landscape.plots.appearance import Look

MEANING = (
    "Singular values of the tokens of one image and of the token means of a mini-batch, relative to the largest, from "
    "the first self-attention (dark) to the last (bright): a steep line means that few directions carry the "
    "representation. The number of tokens, channels and images bounds the rank, so compare networks where these agree."
)
PANELS = {"token_singular_value": "tokens of an image", "image_singular_value": "images of a mini-batch"}
LOWEST = -12.0  # nats below the largest: what lies lower is rounding in single precision


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "token_singular_value") -> Axes:
    """Draw one line per self-attention over the rank, coloured from shallow to deep."""
    colors = matplotlib.colormaps["plasma"]
    for depth, values in zip(data["depth"].values, data[quantity].values, strict=True):
        shown = np.isfinite(values) & (values > LOWEST)
        rank = np.flatnonzero(shown) + 1
        ax.plot(rank, values[shown], color=colors(0.95 * float(depth)), linewidth=0.9)
    ax.set(xlabel="rank", ylabel="ln σ / σ\u2081", xscale="log")
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Tokens above, images below, a column per network."""
    columns = len(answers)
    width = style.COLUMN if columns == 1 else style.PAGE
    figure = style.page(answers, looks, height=3.4, width=width)
    grid = figure.subplots(2, columns, sharey="row", squeeze=False)
    for column, (data, look) in enumerate(zip(answers, looks, strict=True)):
        for ax, (quantity, what) in zip(grid[:, column], PANELS.items(), strict=True):
            draw(data, ax, quantity=quantity)
            if column:
                ax.set_ylabel("")
            ax.set_title(what, fontsize=style.SMALL, loc="right")
        grid[0, column].set_title(style.fitted(look.label, width / columns / 2, 7), loc="left", fontsize=7)
    shades = ListedColormap([matplotlib.colormaps["plasma"](0.95 * i / 255) for i in range(256)])
    bar = ScalarMappable(Normalize(0, 1), shades)
    figure.colorbar(bar, ax=grid, label="normalised depth", aspect=40, pad=0.02)
    return figure

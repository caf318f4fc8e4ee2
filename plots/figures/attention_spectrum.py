"""Draw the singular values of token and image representations after every self-attention (Park et al. 2023)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import depth, style, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Singular values of the tokens of one image and of the token means of a mini-batch, relative to the largest, from "
    "the first self-attention (dark) to the last (bright): a steep line means that few directions carry the "
    "representation. The number of tokens, channels and images bounds the rank, so compare networks where these agree; "
    "the last column follows one rank over depth, half the smallest number of ranks of any layer."
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


def draw_over_depth(data: xr.Dataset, ax: Axes, quantity: str, rank: int, *, look: Look) -> Axes:
    """Draw the singular value of one rank, counted from 1, over the depth of the self-attentions."""
    values = data[quantity].values[:, rank - 1]
    shown = np.isfinite(values)
    ax.plot(data["depth"].values[shown], values[shown], **look.cues, label=look.label)
    ax.set(xlabel="normalised depth", xlim=(-0.03, 1.03))
    return ax


def common_rank(results: Sequence[xr.Dataset], quantity: str) -> int:
    """Half the smallest number of singular values that any layer of any result has, at least 1."""
    counts = [np.isfinite(row).sum() for data in results for row in data[quantity].values]
    return max(1, min((int(count) for count in counts if count), default=1) // 2)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Tokens and images of every network, and at the end one rank of all of them over depth."""
    count, legend = len(results) + 1, looks if len(looks) > 1 else []
    figure, grid, columns = style.by_network(results, looks, 2, count, height=1.7, legend=legend)
    for ax, quantity in zip(grid[:, -1], PANELS, strict=True):
        rank = common_rank(results, quantity)
        for data, look in zip(results, looks, strict=True):
            draw_over_depth(data, ax, quantity, rank, look=look)
        ax.set_title(f"rank {rank}", fontsize=style.SMALL)
        if theme.narrow():  # the colour bar next to it has the same quantity
            ax.set_xlabel("depth")
    for axes, data, look in zip(grid.T, results, looks, strict=False):
        for ax, (quantity, what) in zip(axes, PANELS.items(), strict=True):
            draw(data, ax, quantity=quantity)
            outer = data is results[0] if columns else ax is axes[0]
            ax.set_ylabel(f"{what}\n{ax.get_ylabel()}" if columns and outer else ax.get_ylabel() if outer else "")
            ax.set_title("" if columns else what, fontsize=style.SMALL)
        title = style.fitted(look.label, theme.page_width() / (count if columns else 2), 7)
        axes[0].set_title(title if columns else f"{title}\n{axes[0].get_title()}", fontsize=7)
    depth.color_bar(figure, grid, aspect=40)
    return figure

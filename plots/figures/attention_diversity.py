"""Draw the cosine similarity of heads and of tokens after each self-attention over depth (Park et al. 2023)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import error_of, half_width

MEANING = (
    "Cosine similarity of the attention of two heads, of their outputs, of two tokens of an image, and of a token with "
    "itself one self-attention earlier: near 1, the heads attend alike or return the same, the tokens are alike, or "
    "the layer changes little. A large mean feature shared by all tokens raises the similarity of tokens and of "
    "outputs without making them less distinct to the network."
)
LABELS = {
    "head_cosine": "of the attention of two heads",
    "head_feature_cosine": "of the outputs of two heads",
    "token_cosine": "of two tokens",
    "depth_cosine": "of successive layers",
}


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "token_cosine", look: Look) -> Axes:
    """Draw one similarity over the depth of the self-attentions, with its 95 % interval."""
    shown = np.isfinite(data[quantity].values)
    at, values = (data[name].values[shown] for name in ("depth", quantity))
    errors, halves = (np.broadcast_to(part, shown.shape)[shown] for part in (
        error_of(data, quantity), half_width(data, quantity)))  # fmt: skip
    ax.errorbar(at, values, yerr=broken.bar(halves), **look.cues, elinewidth=0.8, label=look.label)
    broken.mark(ax, at, values, errors)
    ax.set(xlabel="normalised depth", xlim=(-0.03, 1.03), ylabel=f"cosine similarity\n{LABELS[quantity]}")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Heads, tokens and layers, all networks overlaid; outputs of heads where a result holds them."""
    shown = [name for name in LABELS if any(name in data and np.isfinite(data[name]).any() for data in results)]
    note = "Error bars: 95 % intervals over samples."
    columns = min(len(shown), 2)
    figure, axes = style.beside(results, looks, len(shown), height=2.0, columns=columns, legend=looks, note=note)
    for ax, quantity in zip(axes, shown, strict=True):
        for data, look in zip(results, looks, strict=True):
            if quantity in data:
                draw(data, ax, quantity=quantity, look=look)
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.0), max(high, 1.0))
    return figure

"""Draw feature-map variance over depth, per network (Park & Kim 2022, Fig. 9)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import depth
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "How much a feature map varies over its positions, layer by layer: it falls where a layer averages (self-"
    "attention, pooling) and rises where one sharpens (convolution, MLP). The scale of a layer's weights "
    "enters it too, so compare the change across a block rather than the level of two networks."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look, shade: bool = True) -> Axes:
    """Draw the feature-map variance of every layer over normalised depth, on a logarithmic scale."""
    depth.over_depth(data, ax, "variance", look=look, shade=shade)
    values = data["variance"].values[np.isfinite(data["variance"].values)]
    if values.size and values.min() > 0:
        ax.set_yscale("log")
    elif (values > 0).any():  # a constant map has variance 0, which a logarithmic scale cannot show
        ax.set_yscale("symlog", linthresh=float(values[values > 0].min()))
    ax.set(ylabel="feature-map variance")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per network on common axes, and one with all."""
    return depth.page(results, looks, draw)

"""Draw the relative log amplitude at the highest frequency over depth (Park & Kim 2022, Fig. 2b and Fig. 8)."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots import depth
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "How much high-frequency signal each layer leaves, relative to its own mean level: falling means that the "
    "layer is a low-pass filter (self-attention), rising that it is a high-pass (convolution, MLP). The "
    "highest frequency is that of the layer's own grid, so values before and after a reduction (blue "
    "band) refer to different physical scales."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look, shade: bool = True) -> Axes:
    """Draw the relative log amplitude at each layer's own highest frequency over normalised depth."""
    depth.over_depth(data, ax, "high_frequency", look=look, shade=shade)
    ax.set(ylabel="Δ\u00a0ln\u00a0A at the highest frequency")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per network on common axes, and one with all."""
    return depth.page(results, looks, draw)

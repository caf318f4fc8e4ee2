"""Draw attention distance and normalised mutual information of every head over depth (Park et al. 2023)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "How far each head attends, in pixels of the image, and how much its attention depends on the query: points are "
    "heads, lines their mean, and a mutual information of 0 means that all queries attend alike. Windows bound the "
    "distance from above, and a mean over queries and images does not say what a head contributes."
)
LABELS = {
    "distance": "attention distance in pixels",
    "mutual_information": "normalised mutual information",
    "entropy": "entropy of the attention in nats",
}


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "distance", look: Look) -> Axes:
    """Draw one quantity of every head at the depth of its layer, and the mean over heads as a line."""
    values, depth = data[quantity].values, data["depth"].values
    points = np.repeat(depth, values.shape[1]), values.ravel()
    ax.scatter(*points, color=look.color, marker=look.marker, s=7, alpha=0.4, linewidths=0)
    finite = np.isfinite(values)
    shown = finite.any(axis=1)
    means = np.where(finite, values, 0.0)[shown].sum(axis=1) / finite[shown].sum(axis=1)
    ax.plot(depth[shown], means, color=look.color, linestyle=look.line, marker="", label=look.label)
    ax.set(xlabel="normalised depth", xlim=(-0.03, 1.03), ylabel=LABELS[quantity])
    ax.set_ylim(bottom=0.0, auto=True)  # leaves room for networks drawn later
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Distance and mutual information over normalised depth, all networks overlaid."""
    figure = style.page(results, looks, height=2.4, legend=looks, note="Points: heads; lines: their mean.")
    for ax, quantity in zip(figure.subplots(1, 2), ("distance", "mutual_information"), strict=True):
        for data, look in zip(results, looks, strict=True):
            draw(data, ax, quantity=quantity, look=look)
    return figure

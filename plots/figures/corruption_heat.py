"""Draw accuracy, NLL and calibration error of every corruption and severity as heat maps, per network."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.corruption import METRICS, short_names

MEANING = (
    "The score of every corruption (rows) at every severity (columns), each kind of score on one scale for all "
    "networks. White cells are not measured yet, and differences between networks that are smaller than the errors in "
    "the results file mean nothing."
)
MAPS = {"accuracy": "viridis", "nll": "magma_r", "ece": "magma_r"}


def draw(data: xr.Dataset, ax: Axes, *, metric: str = "accuracy", limits: tuple[float, float] | None = None) -> Axes:
    """Draw a score over corruption and severity, with its value in every cell."""
    values = data[metric].where(data["done"] == 1).values
    low, high = limits or limits_of([data], metric)
    image = ax.imshow(values, cmap=MAPS[metric], vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
            ax.text(column, row, text, ha="center", va="center", fontsize=6, color="w" if dark else "k")
    ax.set_xticks(range(data.sizes["severity"]), [str(s) for s in data["severity"].values])
    ax.set_yticks(range(data.sizes["corruption"]), short_names(data))
    ax.tick_params(length=0, labelsize=6)
    ax.set_xlabel("severity")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per network, one column per score; in one column of a paper the scores below each other."""
    stacked = theme.narrow()
    across = 1 if stacked else len(METRICS)
    heights = [(0.11 if stacked else 0.125) * data.sizes["corruption"] + (0.35 if stacked else 0.6) for data in results]
    heights = [height for height in heights for _ in range(len(METRICS) // across)]
    figure = style.page(results, looks, height=sum(heights))
    grid = figure.subplots(len(heights), across, squeeze=False, height_ratios=heights, sharey="row")
    for axes, data, look in zip(grid.reshape(len(results), -1), results, looks, strict=True):
        for ax, (metric, name) in zip(axes, METRICS.items(), strict=True):
            draw(data, ax, metric=metric, limits=limits_of(results, metric))
            title = style.fitted(look.label, 0.8 * theme.page_width() / across, 7, lines=2)
            ax.set_title(
                name if ax is not axes[0] else f"{title}: {name}" if stacked else f"{title}:\n{name}", fontsize=7
            )
    style.label_outer(list(grid.flat))
    return figure


def limits_of(results: Sequence[xr.Dataset], metric: str) -> tuple[float, float]:
    """The range of a score over all results; accuracies from 0."""
    values = np.concatenate([data[metric].values[np.isfinite(data[metric].values)] for data in results])
    low = 0.0 if metric != "nll" else float(values.min(initial=np.inf))
    high = float(values.max(initial=-np.inf))
    return (low, high) if high > low else (min(low, high, 0.0), 1.0)

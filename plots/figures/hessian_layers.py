"""Draw the largest and smallest Hessian eigenvalue of every layer's parameters as bars."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, rows, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.intervals import quantile

MEANING = (
    "The largest (to the right) and the smallest (to the left) eigenvalue of each layer's diagonal block of the "
    "Hessian, mean and 95 % interval over mini-batches. A block leaves out interactions between layers (the largest "
    "eigenvalue of the whole Hessian is at least that of every block), and an end that is not among the wanted "
    "eigenvalues is as rough as its stored residual, unless --ends followed it."
)
ROW = 0.115  # inches per layer


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw both ends of every layer's spectrum, the first layer on top; the result has an axis `group`."""
    at = np.arange(data.sizes["group"])
    ends = [_mean(data, name) for name in ("largest", "smallest")]
    for (mean, error), alpha in zip(ends, (1.0, 0.45), strict=True):
        ax.barh(at, mean, xerr=error, height=0.75, color=look.color, alpha=alpha,
                error_kw={"elinewidth": 0.6, "ecolor": "0.25"})  # fmt: skip
    ax.axvline(0, color=theme.muted(), linewidth=0.6)
    sizes = np.abs(ends[0][0][np.isfinite(ends[0][0])])
    if sizes.size and sizes.max() > 20 * np.median(sizes) > 0:
        style.asinh(ax, "x", float(np.quantile(sizes, 0.25)) or float(np.median(sizes)))
    ax.set_yticks(at, [appearance.escaped(str(name)) for name in data["name"].values], fontsize=6)
    ax.set(ylim=(len(at) - 0.4, -0.6), xlabel="Hessian eigenvalue of the layer's block")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result, as high as the longest list of layers needs."""
    note = (
        "Bars: means of the largest (dark) and the smallest eigenvalue (light, unseen near 0), with 95 % intervals "
        "over mini-batches."
    )
    return rows.panel_each(results, looks, draw, "group", ROW, note=note)


def _mean(data: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the finished mini-batches and half its 95 % interval, (group,)."""
    values = data[name].transpose("batch", "group").values
    count = np.isfinite(values).sum(axis=0)
    total = np.nansum(values, axis=0)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    squares = np.nansum((values - mean) ** 2, axis=0)
    error = np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1) / np.maximum(count, 1)), 0.0)
    return mean, np.nan_to_num(quantile(count) * error)

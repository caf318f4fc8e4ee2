"""Draw the Hessian eigenvalues of mini-batches over their loss: are the sharp mini-batches those with a high loss?"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.options import counted
from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.sensitivity import rank_correlation

MEANING = (
    "Eigenvalues of every mini-batch over its loss: the one of largest magnitude as a large mark, the others small. "
    "The rank correlation is that of the large marks; it says that sharpness and loss vary together over mini-batches "
    "of one network, not that one causes the other."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the eigenvalues of every finished mini-batch over its loss."""
    loss, values = data["loss"].values, data["eigenvalue"].transpose("batch", "rank").values
    others = np.repeat(loss, values.shape[1] - 1)
    ax.plot(others, values[:, 1:].ravel(), ".", color=look.color, alpha=0.35, markersize=2)
    ax.plot(loss, values[:, 0], look.marker, color=look.color, markersize=3.2, label=look.label, markeredgewidth=0)
    ax.axhline(0, color="0.6", linewidth=0.5, zorder=0)
    ax.set(xlabel=appearance.loss_label([data], "loss of the mini-batch"), ylabel="Hessian eigenvalue")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results in one panel, the rank correlation in the legend."""
    legend = [
        replace(look, label=f"{look.label}: {_numbers(data)}", line=" ")
        for data, look in zip(results, looks, strict=True)
    ]
    note = "Large: the largest in magnitude of each mini-batch; small: its others."
    figure, ax = style.overlaid(results, looks, draw, height=2.3, legend=legend, note=note)
    values = np.concatenate([data["eigenvalue"].values.ravel() for data in results])
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
    if sizes.size and sizes.max() > 100 * np.median(sizes):
        style.asinh(ax, "y", float(np.median(sizes)))
    return figure


def correlation(data: xr.Dataset) -> float:
    """Spearman's rank correlation of loss and largest-magnitude eigenvalue; NaN below four mini-batches."""
    return rank_correlation(data["loss"].values, np.abs(data["eigenvalue"].isel(rank=0).values))[0]


def _numbers(data: xr.Dataset) -> str:
    found, count = correlation(data), int(np.isfinite(data["loss"].values).sum())
    return counted(count, "mini-batch") + (f", rank correlation {found:.2f}" if np.isfinite(found) else "")

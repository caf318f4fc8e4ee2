"""Draw the trace of the Hessian of every mini-batch and of all samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, headlines, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import rounding, stored

MEANING = (
    "The sum of all Hessian eigenvalues, a measure of sharpness: points are mini-batches, the line is the mean over "
    "all samples, error bars and band are 95 % intervals over random vectors. Eigenvalues of both signs cancel "
    "in it, and rescaling weights that leaves the network's function alone changes it."
)
DECADE = 10.0
BESIDE = 0.3  # share of the distance between two mini-batches over which results are drawn side by side


def draw(data: xr.Dataset, ax: Axes, *, look: Look, shift: float = 0.0) -> Axes:
    """Draw the trace of every mini-batch with its 95 % interval, and that over all samples as a line with its band.

    The points are shifted to the right, so that those of several results do not overlap.
    """
    at, values, errors = data["batch"].values + shift, data["batch_trace"].values, stored.error_of(data, "batch_trace")
    ax.errorbar(
        at, values, broken.bar(stored.half_width(data, "batch_trace")),
        color=look.color, marker=look.marker, linestyle="none", markersize=3, elinewidth=0.8, label=look.label,
    )  # fmt: skip
    broken.mark(ax, at, values, errors)
    whole, half = float(data["trace"]), float(stored.half_width(data, "trace"))
    if np.isfinite(whole):
        ax.axhline(whole, color=look.color, linestyle=look.line, linewidth=0.9)
    if np.isfinite(whole) and np.isfinite(half):
        ax.axhspan(whole - half, whole + half, color=look.color, alpha=0.15, linewidth=0)
    ax.set(xlabel="mini-batch", ylabel="trace of the Hessian")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results overlaid, the traces in the legend; logarithmic where they are positive and decades apart."""
    pairs = list(zip(results, looks, strict=True))
    legend = [replace(look, label=f"{look.label}: {_number(data)}") for data, look in pairs]
    note = "Bars and bands: 95 % intervals over random vectors."
    figure = style.page(results, looks, height=2.2, legend=legend, note=note)
    ax = figure.subplots()
    for i, (data, look) in enumerate(pairs):
        draw(data, ax, look=look, shift=BESIDE * (i / len(results) - 0.5 + 0.5 / len(results)))
    found = np.concatenate([data["batch_trace"].values for data in results])
    found = found[np.isfinite(found)]
    if found.size and found.min() > 0 and found.max() > DECADE * found.min():
        ax.set_yscale("log")
    else:
        ax.axhline(0.0, color="0.5", linewidth=0.5)
    ax.set_xlim(-0.6, max(data.sizes["batch"] for data in results) - 0.4)  # one mini-batch is an axis too
    style.whole_numbers(ax)
    return figure


def _number(data: xr.Dataset) -> str:
    return rounding.plus_minus(float(data["trace"]), float(stored.half_width(data, "trace")), 2)


def notes(data: xr.Dataset) -> dict[str, str]:
    """That `tol` is not met, and how many mini-batches are left out."""
    lost = 0
    if "batch_trace" in data:
        done = data.variables["done"].values == 1
        done = done.any(data.variables["done"].dims.index("round")) if "round" in data.variables["done"].dims else done
        lost = int((done & ~np.isfinite(data.variables["batch_trace"].values)).sum())
    return headlines.missed_tol(data) | ({"mini-batches not finite": str(lost)} if lost else {})

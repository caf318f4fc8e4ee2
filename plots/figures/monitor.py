"""Draw the sharpness of a run over its steps, with the threshold at which its optimiser becomes unstable."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Draw, Figure, Look

MEANING = (
    "The largest Hessian eigenvalue of the loss on one mini-batch (solid) and the largest one that the optimiser can "
    "bear (dashed; 2 / learning rate for gradient descent): full-batch training that rises to the dashed line and "
    "stays there trains at the edge of stability. The threshold is that of full-batch training on a quadratic; noisy "
    "gradients and momentum keep a run below it, and it says nothing about optimisers with a preconditioner."
)
ABOVE = 10.0  # times the largest eigenvalue, above which thresholds are not shown
LIMIT = "stability threshold of the optimiser"
MARKS = 14  # of a line: with more rows not every one has a mark


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the largest eigenvalue over the steps and its threshold; ringed where a search has not converged."""
    return over_steps(data, ax, "eigenvalue", "threshold", "converged", "largest Hessian eigenvalue", look)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    return overlaid(results, looks, draw, "eigenvalue", "threshold")


def over_steps(
    data: xr.Dataset, ax: Axes, quantity: str, threshold: str, converged: str, name: str, look: Look
) -> Axes:
    """Draw the first rank of eigenvalues over the steps, and a threshold."""
    step, value = data["step"].values, data[quantity].transpose("step", "rank").values[:, 0]
    known = np.isfinite(value)
    every = max(1, int(known.sum()) // MARKS)
    ax.plot(step[known], value[known], color=look.color, linewidth=0.9, label=look.label, marker=look.marker,
            markersize=3.5, markevery=every)  # fmt: skip
    unsure = known & (data[converged].transpose("step", "rank").values[:, 0] == 0)
    ax.plot(step[unsure], value[unsure], look.marker, color=look.color, markerfacecolor="none", markersize=5.5)
    limit = data[threshold].values
    there = np.isfinite(limit)
    ax.plot(step[there], limit[there], "--", color=look.color, linewidth=0.8, marker=look.marker, markersize=3.5,
            markerfacecolor=theme.ground(), markevery=[-1] if there.any() else None)  # fmt: skip
    for at in announced(data):
        ax.plot(at, 0.96, "v", transform=ax.get_xaxis_transform(), color=look.color, markersize=5)
    units = str(data[quantity].attrs.get("units", "1"))
    style.whole_numbers(ax)
    ax.set(xlabel="step", ylabel=f"{name}\n({units})" if units != "1" else name)
    return ax


def announced(data: xr.Dataset) -> np.ndarray:
    """The steps at which a loss spike is announced for the first time, or again."""
    alarm = data["alarm"].values == 1 if "alarm" in data else np.zeros(len(data["step"]), bool)
    return np.asarray(data["step"].values[alarm & ~np.append(False, alarm[:-1])])


def overlaid(
    results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, quantity: str, threshold: str, limit: str = LIMIT
) -> Figure:
    """Runs in one panel, logarithmic where their values are wide."""
    note = _about_threshold(results, quantity, threshold, limit)
    legend = [replace(look, line="-") for look in looks]
    note += " Ringed: not converged." + " Triangle: announced loss spike." * any(len(announced(one)) for one in results)
    figure, ax = style.overlaid(results, looks, draw, height=2.5, legend=legend, note=note)
    everything = np.concatenate([data[quantity].values[np.isfinite(data[quantity].values)] for data in results])
    limits = np.concatenate([data[threshold].values[np.isfinite(data[threshold].values)] for data in results])
    if not everything.size:
        return figure
    shown = np.append(everything, limits[limits <= ABOVE * everything.max()])  # it rises without end as the rate decays
    if style.is_wide(everything):
        ax.set_yscale("log")
        ax.set_ylim(shown.min() / 1.5, 1.5 * shown.max())
    elif shown.max() > 0:
        ax.set_ylim(min(0.0, 1.05 * shown.min()), 1.08 * shown.max())
    return figure


def _about_threshold(results: Sequence[xr.Dataset], quantity: str, threshold: str, limit: str) -> str:
    limits, values = (np.concatenate([data[n].values.ravel() for data in results]) for n in (threshold, quantity))
    if np.isfinite(limits).any():
        lowest, highest = np.nanmin(limits), np.nanmax(values, initial=0.0, where=np.isfinite(values))
        if lowest > ABOVE * highest > 0:
            return f"Not shown, far above: {limit}, {lowest:.3g} or more."
        return f"Dashed: {limit}."
    if any(
        np.isfinite(data["preconditioned_threshold"].values).any()
        for data in results
        if "preconditioned_threshold" in data
    ):
        return "The threshold of this optimiser is that of its preconditioned eigenvalue, see monitor_preconditioned."
    said = (re.search(r"\((no threshold of .* is known)\)", str(data.attrs.get("protocol", ""))) for data in results)
    if unknown := next(filter(None, said), None):
        return f"N{unknown[1][1:]}, and none is drawn."
    return "No threshold: the monitor was given no optimizer= or has seen no update."

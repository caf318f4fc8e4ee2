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
    """Draw the largest eigenvalue over the steps and its threshold; hollow where a search has not converged."""
    return over_steps(data, ax, "eigenvalue", "threshold", "largest Hessian eigenvalue", look, converged="converged")


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    return overlaid(results, looks, draw, "eigenvalue", "threshold")


def over_steps(
    data: xr.Dataset, ax: Axes, quantity: str, threshold: str, name: str, look: Look, *, converged: str = ""
) -> Axes:
    """Draw a quantity over the steps, of eigenvalues the first, and a threshold."""
    data = data.isel(rank=0, missing_dims="ignore")
    step, value = data["step"].values, data[quantity].values
    known = np.isfinite(value)
    every = max(1, int(known.sum()) // MARKS)
    ax.plot(step[known], value[known], color=look.color, linewidth=0.9, label=look.label, marker=look.marker,
            markersize=3.5, markevery=every)  # fmt: skip
    if converged:
        unsure = known & (data[converged].values == 0)
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
    everything, limits = (
        np.concatenate([one[np.isfinite(one)] for one in (data[name].values for data in results)])
        for name in (quantity, threshold)
    )
    note = f"{_about_threshold(results, everything, limits, limit)} Hollow on a solid line: not converged."
    note += " Triangle: announced loss spike." * any(len(announced(one)) for one in results)
    legend = [replace(look, line="-") for look in looks]
    figure, ax = style.overlaid(results, looks, draw, height=2.5, legend=legend, note=note)
    if not everything.size:
        return figure
    shown = np.append(everything, limits[limits <= ABOVE * everything.max()])  # it rises without end as the rate decays
    if style.is_wide(everything):
        ax.set_yscale("log")
        ax.set_ylim(shown.min() / 1.5, 1.5 * shown.max())
    elif shown.max() > 0:
        ax.set_ylim(min(0.0, 1.05 * shown.min()), 1.08 * shown.max())
    return figure


def _about_threshold(results: Sequence[xr.Dataset], values: np.ndarray, limits: np.ndarray, limit: str) -> str:
    """What is drawn of thresholds, or why none is; by the finite values and thresholds of all runs."""
    if limits.size:
        lowest, highest = limits.min(), values.max(initial=0.0)
        if lowest > ABOVE * highest > 0:
            return f"Not shown, far above: {limit}, {lowest:.3g} or more."
        return f"Dashed: {limit}{', where it is not far above' * bool(limits.max() > ABOVE * highest)}."
    if any(np.isfinite(data.get("preconditioned_threshold", np.nan)).any() for data in results):
        return "The threshold of this optimiser is that of its preconditioned eigenvalue, see monitor_preconditioned."
    said = (re.search(r"\((no threshold of .* is known)\)", str(data.attrs.get("protocol", ""))) for data in results)
    if unknown := next(filter(None, said), None):
        return f"N{unknown[1][1:]}, and none is drawn."
    return "No threshold: the monitor was given no optimizer= or has seen no update."

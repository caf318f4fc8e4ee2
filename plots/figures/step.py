"""Draw the sharpness that an optimiser meets along its step, and the change of the objective that the step makes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.theme import ground, ink, muted, narrow
from landscape.statistics.stored import half_width

MEANING = (
    "How sharp the loss is to the optimiser that walks on it: along the gradients of mini-batches (batch sharpness), "
    "along its update, and by how far the update can be lengthened before the loss rises (critical sharpness); where "
    "the latter reaches 2 / learning rate, the next step no longer lowers the loss of its own mini-batch. Sharpness "
    "along one direction says nothing of other directions, and the step is that of the stored state and learning rate, "
    "not of the whole training."
)
SHARPNESS = {  # per mini-batch, the summary, and its name
    "gradient_sharpness": ("mean_batch_sharpness", "gradient\n(batch sharpness)"),
    "directional_sharpness": ("mean_directional_sharpness", "update"),
    "critical_sharpness": ("mean_critical_sharpness", "critical"),
}
CHANGES = {"predicted_change_first": "1st order", "predicted_change": "2nd order", "actual_change": "actual"}
BESIDE = 0.6  # share of the distance between two columns over which results and kinds are drawn side by side
DOTS = 0.35  # opacity of single mini-batches
DECADE = 10.0
NEAR = 100.0  # factor between the critical sharpness and a line that is drawn
SHORTEST = 0.3  # length of that line in columns


def draw(
    data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look, shift: float = 0.0, width: float = 0.3
) -> tuple[Axes, ...]:
    """Draw the sharpness (first axes) and the change of the objective (second, if any), with 95 % intervals.

    The change is in shares of what the first order predicts: changes of two learning rates may be decades apart.
    Small marks are single mini-batches; the dashed line is 2 / learning rate, if that is near. Open marks are the other
    mini-batches.
    """
    ax = axes[0]
    for i, (name, (summary, _)) in enumerate(SHARPNESS.items()):
        _column(ax, data, name, summary, i + shift, look, width=width)
    critical = float(data["mean_critical_sharpness"]) if "mean_critical_sharpness" in data else np.nan
    rate = float(data.attrs.get("learning_rate", 0.0))
    if rate > 0 and critical / NEAR < 2 / rate < critical * NEAR:
        column = len(SHARPNESS) - 1 + shift
        ends = column - max(width, SHORTEST) / 2, column + max(width, SHORTEST) / 2
        ax.plot(ends, [2 / rate] * 2, color=look.color, linestyle="--", linewidth=1.2, zorder=2)
    ax.set_xticks(range(len(SHARPNESS)), [label for _, label in SHARPNESS.values()])
    ax.set(ylabel="sharpness", xlim=(-0.5, len(SHARPNESS) - 0.5))
    for change in axes[1:]:
        shares = _shares(data)
        for i, name in enumerate(CHANGES):
            for prefix, side in (("", -width / 4), ("other_", width / 4)):
                of = f"{prefix}{name}", f"mean_{prefix}{name}"
                _column(change, shares, *of, i + shift + side, look, width=width / 2, filled=not prefix)
        change.axhline(0.0, color=ink(), linewidth=0.5)
        change.set_xticks(range(len(CHANGES)), list(CHANGES.values()))
        change.set(ylabel="change of the objective / first order", xlim=(-0.5, len(CHANGES) - 0.5))
    return axes


def _shares(data: xr.Dataset) -> xr.Dataset:
    """Changes of the objective as shares of the fall that the first order predicts for the update's own mini-batch."""
    size = abs(float(data["mean_predicted_change_first"])) if "mean_predicted_change_first" in data else np.nan
    changes = [name for name in map(str, data.data_vars) if "_change" in name]
    return data.assign({name: data[name] / size for name in changes}) if 0 < size < np.inf else data


def _column(
    ax: Axes, data: xr.Dataset, name: str, summary: str, at: float, look: Look, *, width: float, filled: bool = True
) -> None:
    """Mini-batches as dots beside each other, and their mean with its 95 % interval."""
    if name not in data:
        return
    values = data[name].where(data["done"] == 1).values
    values = values[np.isfinite(values)]
    if not len(values):
        return
    places = at + width * (np.arange(len(values)) / max(len(values) - 1, 1) - 0.5) * 0.8
    face = look.color if filled else ground()
    ax.plot(
        places, values, linestyle="none", marker=look.marker, markersize=1.8, color=look.color, markerfacecolor=face,
        alpha=DOTS,
    )  # fmt: skip
    mean, half = (float(data[summary]), float(half_width(data, summary))) if summary in data else (np.nan, np.nan)
    ax.errorbar(
        [at], [mean], half if np.isfinite(half) else None, color=look.color, marker=look.marker,
        markersize=6, elinewidth=1.2, capsize=2, markerfacecolor=face, linestyle="none", zorder=3,
    )  # fmt: skip


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Both panels, all results side by side in each column."""
    labels = [
        replace(look, label=f"{look.label}: {_optimizer(data)}") for data, look in zip(results, looks, strict=True)
    ]
    note = (
        "In each column the networks stand in the order of the legend. Small: mini-batches; bars: 95 % intervals of "
        f"their mean; dashed: 2 / learning rate, if within a factor of 100. {'Below' if narrow() else 'Right'}: shares "
        "of what the first order predicts; filled, on the mini-batch of the gradient; open, on others."
    )
    legend = labels
    figure = style.page(results, looks, height=4.2 if narrow() else 2.8, legend=legend, note=note)
    axes = tuple(figure.subplots(2, 1) if narrow() else figure.subplots(1, 2, width_ratios=[1.1, 1.0]))
    width = BESIDE / len(results)
    for i, (data, look) in enumerate(zip(results, looks, strict=True)):
        draw(data, axes, look=look, shift=BESIDE * (i + 0.5) / len(results) - BESIDE / 2, width=width)
    found = np.concatenate([data[name].values for data in results for name in SHARPNESS])
    found = found[np.isfinite(found)]
    if len(found) and found.min() > 0:
        axes[0].set_yscale("log")
    elif len(found) and np.abs(found).max() > DECADE * np.median(np.abs(found)):
        axes[0].set_yscale("symlog", linthresh=max(float(np.median(np.abs(found))), 1e-12))
    if axes[0].get_yscale() != "log":
        axes[0].axhline(0.0, color=muted(), linewidth=0.5)
    return figure


def _optimizer(data: xr.Dataset) -> str:
    name = str(data.attrs.get("optimizer", "")).partition("(")[0]
    return f"{name}, learning rate {float(data.attrs.get('learning_rate', np.nan)):.3g}"


def notes(data: xr.Dataset) -> dict[str, str]:
    """In how many mini-batches the objective rises at once, and in how many its rise was not found."""
    found = {}
    share = float(data["descending"]) if "descending" in data else np.nan
    if np.isfinite(share) and share < 1:
        found["mini-batches whose objective falls at first"] = f"{share:.0%}"
    if "converged" in data and "descends" in data:
        lost = int(((data["descends"] == 1) & (data["converged"] == 0)).sum())
        found |= {"not converged": str(lost)} if lost else {}
    return found

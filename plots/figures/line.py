"""Draw loss and accuracy along lines through the weights, with bands, and the barrier between two checkpoints."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import DASHES, LINES, escaped, loss_label, names
from landscape.plots.figure import Axes, Color, Figure, Line, Look
from landscape.statistics import intervals, rounding, stored

MEANING = (
    "Loss and accuracy along straight lines through the trained weights, or from one checkpoint (t = 0) to another "
    "(t = 1), straight or along a trained curve, where the barrier is how far the loss rises above the straight line "
    "between the ends' losses. A line is one direction out of millions: a flat one does not make a flat minimum, and a "
    "barrier on the straight line does not exclude a curved path without one."
)
TITLES = {
    "random": "random directions", "eigen": "Hessian eigenvectors", "checkpoints": "from one checkpoint to another",
    "curve": "along a trained curve from one checkpoint to another", "run": "principal components of the run",
    "file": "directions of a file",
}  # fmt: skip


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look, lines: Sequence[Line] = LINES) -> tuple[Axes, ...]:
    """Draw the loss (first axes) and the accuracy (second, if any) of every direction, bands of 95 % intervals.

    Several random directions are thin lines with their mean and its 95 % interval over directions.
    `lines`: line styles of the directions; the first is that of the mean.
    """
    draw_curves(data, axes, look, lines, "direction", _axis(data))
    _barriers(data, axes[0], look)
    return axes


def draw_curves(
    data: xr.Dataset, axes: Sequence[Axes], look: Look, lines: Sequence[Line], along: str, xlabel: str
) -> None:
    """Draw loss and accuracy of every curve `along` an axis of the result, or where there are none, why."""
    for ax, name in zip(axes, ("loss", "accuracy"), strict=False):
        values = data[name].where((data["done"] == 1) & np.isfinite(data[name])).transpose(along, "t").values
        halves = stored.half_width(data.transpose(along, "t", ...), name)
        t = data["t"].values
        if along == "direction" and _spread(data):
            for value in values:
                ax.plot(t, value, color=look.color, linewidth=0.4, alpha=0.6)
            error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
            band(ax, t, values.mean(axis=0), intervals.quantile(len(values)) * error, look, lines[0])
        else:
            for k, (value, half) in enumerate(zip(values, halves, strict=True)):
                band(ax, t, value, half, look, lines[k % len(lines)])
        if not np.isfinite(values).any():
            text = str(data[name].attrs.get("long_name", name)).replace(": ", ":\n")
            style.write_centred(ax, text, va="center", fontsize=7, wrap=True)
        ax.set(xlabel=xlabel, ylabel=loss_label([data]) if name == "loss" else name)
        ax.locator_params(axis="x", nbins=6)  # small ranges have long labels


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per kind of line: the loss on the left, the accuracy on the right if defined; checkpoints overlaid."""
    kinds = list(dict.fromkeys((kind(data), _axis(data)) for data in results))
    rows = [[(d, k) for d, k in zip(results, looks, strict=True) if (kind(d), _axis(d)) == which] for which in kinds]
    entries = [_entries(row) for row in rows]
    note = "Bands: 95 % intervals over samples"
    spread = any(map(_spread, results))
    note += "; of several random directions, of their mean over directions." if spread else "."
    if any("barrier" in data for data in results):
        note += " Dotted: straight line between the ends; bars up from it: the barrier."
    legend = [entry for row in entries for curves in row for entry in curves]
    figure = style.page(results, looks, height=2.1 * len(kinds), legend=legend, note=note)
    defined = any(data["accuracy"].attrs.get("units") != "undefined" for data in results)
    grid = figure.subplots(len(kinds), 2 if defined else 1, squeeze=False)
    for axes, (which, _), row, drawn in zip(grid, kinds, rows, entries, strict=True):
        for (data, look), curves in zip(row, drawn, strict=True):
            draw(data, tuple(axes), look=look, lines=[curve.line for curve in curves])
        losses = np.concatenate([data["loss"].values[data["done"].values == 1] for data, _ in row])
        style.log_if_wide(axes[0], losses)
        axes[0].set_title(TITLES.get(which, which))
        for ax in axes[1:]:
            ax.set_ylim(-0.03, 1.03)
    return figure


def kind(data: xr.Dataset) -> str:
    """Where the directions come from; `curve` for a trained one between checkpoints."""
    return "curve" if data.attrs.get("connect") else str(data.attrs.get("along", ""))


def _spread(data: xr.Dataset) -> bool:
    """Whether a result is shown as a mean and a spread over its directions."""
    return kind(data) == "random" and data.sizes["direction"] > 1


def band(ax: Axes, t: np.ndarray, value: np.ndarray, half: np.ndarray, look: Look, line: Line) -> None:
    """Draw a curve with a band of so much to either side."""
    known = np.pad(np.isfinite(value), 1)
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    ax.plot(t, value, color=look.color, linestyle=line)
    ax.plot(t[alone], value[alone], ".", color=look.color)  # a single finished point is no line
    if np.isfinite(half).any():
        ax.fill_between(t, value - half, value + half, color=look.color, alpha=0.2, linewidth=0)


def _barriers(data: xr.Dataset, ax: Axes, look: Look) -> None:
    """Draw the straight line between the ends, and a known barrier as a bar up from it."""
    if "barrier" not in data:
        return
    loss, t = data["loss"].transpose("direction", "t").values, data["t"].values
    ends = (t == 0.0).any() and (t == 1.0).any()
    for k in np.flatnonzero(np.isfinite(data["barrier"].values)) if ends else ():
        first, last = loss[k, t == 0.0][0], loss[k, t == 1.0][0]
        ax.plot([0.0, 1.0], [first, last], ":", color=look.color, linewidth=0.8)
        at, height = data["barrier_at"].values[k], data["barrier"].values[k]
        if height > 0:
            low = (1 - at) * first + at * last
            ax.plot([at, at], [low, low + height], color=look.color, linewidth=0.8, marker="_")


def _entries(row: Sequence[tuple[xr.Dataset, Look]]) -> list[list[Look]]:
    """The curves of every result in a row; line styles are reused within a colour only when there are no more."""
    used: dict[Color, int] = {}
    entries = []
    for data, look in row:
        curves = []
        for label in _labels(data, [other for other, _ in row]):
            place = used.setdefault(look.color, DASHES.index(look.line))
            curves.append(Look(label, look.color, "", DASHES[place % len(DASHES)]))
            used[look.color] = place + 1
        entries.append(curves)
    return entries


def _labels(data: xr.Dataset, row: Sequence[xr.Dataset]) -> list[str]:
    """Checkpoint and direction; results that share both are labelled with the parameters that differ."""
    alike = [other for other in row if _checkpoint_and_directions(other) == _checkpoint_and_directions(data)]
    name = names(alike)[[other is data for other in alike].index(True)]
    if _spread(data):
        return [f"{name}: {data.sizes['direction']} random directions"]
    return [f"{name}: {escaped(str(which))}{_barrier(data, k)}" for k, which in enumerate(data["name"].values)]


def _checkpoint_and_directions(data: xr.Dataset) -> tuple[str, ...]:
    return str(data.attrs.get("label", "")), *map(str, data["name"].values)


def _barrier(data: xr.Dataset, k: int) -> str:
    if "barrier" not in data or not np.isfinite(data["barrier"].values[k]):
        return ""
    return f", barrier {rounding.plus_minus(data['barrier'].values[k], stored.half_width(data, 'barrier')[k])}"


def _axis(data: xr.Dataset) -> str:
    if kind(data) == "curve":
        return "position $t$ on the curve"
    units = escaped(str(data["t"].attrs.get("units", "1")))
    return f"position on the line ({units})" if units not in ("", "1") else "position on the line"


def notes(data: xr.Dataset) -> dict[str, str]:
    """That no point of the straight lines between checkpoints is above them."""
    flat = "barrier" in data and np.nanmax(data.variables["barrier"].values, initial=-np.inf) == 0.0
    return {"barrier": f"0, at none of {data.sizes['t']} points"} if flat else {}

"""Draw the loss increase of every perturbed unit, and that of all units together beside the sum of the single ones."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import lesion
from landscape.plots.theme import dark, ground, ink, narrow, page_width
from landscape.statistics.stored import error_of, half_width

MEANING = (
    "By how much the loss rises when the weights of one unit are quantised, pruned or disturbed, with 95 % "
    "intervals of the paired differences, and beside it that of all units together (filled) with the sum of the single "
    "ones (open): where the two agree, a table of bit-widths may add single increases up. It says nothing of training "
    "with quantised weights, of quantised activations, or of other samples than those that were measured."
)
NOTE = (
    "Bars: 95 % intervals. Right: all units together (filled) and the sum of the single increases (open). "
    "Vertical axes are linear near 0."
)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p")
LINEAR = 1e-3  # of the loss, within which the axis is linear at least


def draw(
    data: xr.Dataset, axes: tuple[Axes, ...], *, hues: Mapping[str, tuple[Any, str]] | None = None
) -> tuple[Axes, ...]:
    """Draw the loss increase of every unit at every setting (first axes), and of all units (second, if any)."""
    hues = hues or hues_of([data])
    ax, settings = axes[0], [str(name) for name in data["setting_name"].values]
    data = data.transpose("unit", "setting", ...)
    name = "loss_increase"
    increase, error, half = data[name].values, error_of(data, name), half_width(data, name)
    beside = np.linspace(-0.3, 0.3, len(settings)) if len(settings) > 1 else [0.0]
    places = data["unit"].values
    for s, name in enumerate(settings):
        color, marker = hues[name]
        finite = np.where(np.isfinite(increase[:, s]), increase[:, s], np.nan)
        ax.errorbar(
            places + beside[s], finite, broken.bar(half[:, s]), color=color, marker=marker, markersize=2.6,
            linestyle="none", elinewidth=0.6, label=name,
        )  # fmt: skip
        broken.mark(ax, places + beside[s], increase[:, s], error[:, s])
    ax.axhline(0.0, color=ink(), linewidth=0.5, zorder=0)
    ax.set(ylabel=f"loss increase ({units_of(data)})", xlim=(places[0] - 0.6, places[-1] + 0.6))
    lesion.name_units(data, ax)
    for other in axes[1:]:
        _together(data, other, settings, hues)
    low, high = _range(data)
    for one in axes:
        one.set_yscale("symlog", linthresh=_linear(increase), linscale=0.6)
        one.yaxis.minorticks_off()
        one.set_ylim(low, high)
    return axes


def units_of(data: xr.Dataset) -> str:
    """Those of the loss."""
    return str(data["loss_increase"].attrs.get("units", "nats"))


def _range(data: xr.Dataset) -> tuple[float, float]:
    """Ends of the vertical axis, with room for the markers."""
    ends = [data["sum_loss_increase"].values]
    for name in ("loss_increase", "together_loss_increase"):
        error = broken.bar(half_width(data, name))
        ends += [(data[name].values - error).ravel(), (data[name].values + error).ravel()]
    values = np.concatenate(ends)
    values = values[np.isfinite(values)]
    linear = _linear(data["loss_increase"].values)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    return min(1.8 * low, -linear / 2), max(1.8 * high, linear)


def hues_of(results: Sequence[xr.Dataset]) -> dict[str, tuple[Any, str]]:
    """Colour and marker of every setting of some results, from the weakest to the strongest."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(str(name) for data in results for name in data["setting_name"].values))
    ends = (0.25, 1.0) if dark() else (0.0, 0.85)
    colors = colormaps["viridis"](np.linspace(*ends, len(names))[::-1])
    return {name: (tuple(color), marker) for name, color, marker in zip(names, colors, cycle(MARKERS), strict=False)}


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per network, units on the left and all of them on the right."""
    from matplotlib.lines import Line2D

    hues = hues_of(results)
    legend = [Line2D([], [], color=c, marker=m, markersize=4, linestyle="none", label=n) for n, (c, m) in hues.items()]
    longest = [max(map(len, lesion.shortened(data["name"].values))) for data in results]
    heights = [1.5 + 0.05 * min(letters, 24) for letters in longest]
    figure = style.page(results, looks, height=sum(heights) + 0.2 * len(results), legend=legend, note=NOTE)
    grid = figure.subplots(
        len(results), 2, squeeze=False, width_ratios=[2 if narrow() else 4, 1], height_ratios=heights, sharey="row"
    )
    for row, data, look in zip(grid, results, looks, strict=True):
        draw(data, tuple(row), hues=hues)
        row[0].set_title(style.fitted(look.label, page_width() * 0.7, 8, lines=1), loc="left")
        row[1].set_ylabel("")
    return figure


def _together(data: xr.Dataset, ax: Axes, settings: Sequence[str], hues: Mapping[str, tuple[Any, str]]) -> None:
    """All units together, filled, beside the sum of the single increases, open."""
    together, added = (data[f"{name}_loss_increase"].values for name in ("together", "sum"))
    error, half = error_of(data, "together_loss_increase"), half_width(data, "together_loss_increase")
    for s, name in enumerate(settings):
        color, marker = hues[name]
        value = together[s] if np.isfinite(together[s]) else np.nan
        ax.errorbar([s - 0.12], [value], broken.bar(half[s : s + 1]), color=color, marker=marker,
                    markersize=4, elinewidth=0.8, linestyle="none")  # fmt: skip
        if np.isfinite(added[s]):
            ax.plot([s + 0.12], [added[s]], color=color, marker=marker, markersize=4, markerfacecolor=ground(),
                    linestyle="none")  # fmt: skip
    broken.mark(ax, np.arange(len(settings)) - 0.12, together, error)
    ax.axhline(0.0, color=ink(), linewidth=0.5, zorder=0)
    ax.set_xticks(range(len(settings)), settings, rotation=90)
    ax.set(xlim=(-0.6, len(settings) - 0.4), ylabel=f"all units ({units_of(data)})")


def _linear(increase: np.ndarray) -> float:
    """Half-width of the linear part of the axis: the size of the smallest tenth of the increases."""
    sizes = np.abs(increase[np.isfinite(increase)])
    return max(float(np.quantile(sizes, 0.1)), LINEAR) if sizes.size else LINEAR

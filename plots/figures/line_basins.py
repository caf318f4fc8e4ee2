"""Draw scores of several data sets along lines from a checkpoint, with the radii of their basins."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, basin_panels, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Loss and accuracy on every data set along lines from the checkpoint at 0, with the distance up to which each "
    "stays within its interval (dotted): its basin. A basin along random directions says nothing of the worst "
    "direction, and its radius depends on the margin and on how long the directions are made."
)


def draw(
    data: xr.Dataset, axes: tuple[Axes, ...], *, known: Mapping[tuple[str, str], Look] | None = None
) -> tuple[Axes, ...]:
    """Draw losses (first axes) and accuracies (second) of all data sets and directions; `known`: looks by data set."""
    known = known or basin_panels.styles([data])
    t, sides = data["t"].values, data["side"].values
    values: list[list[np.ndarray]] = [[], []]
    halves = basin_panels.half_width(data, "score_worse")
    several = data.sizes["direction"] > 1
    for ax in axes:
        ax.set_xlim(t[0], t[-1])
        if t[0] < 0:
            ax.axvline(0.0, color=theme.muted(), linewidth=0.5, zorder=0)  # the checkpoint
    for s, panel, look, edge in basin_panels.scores(data, known, axes):
        for k in range(data.sizes["direction"]):
            value, half = (
                found.transpose("direction", "t", "score").values[k, :, s] for found in (data["score_value"], halves)
            )
            value = np.where(data["done"].transpose("direction", "t").values[k] == 1, value, np.nan)
            values[panel].append(value)
            basin_panels.draw_curve(axes[panel], t, value, half, look, thin=several)
            ends = [data[f"basin_radius{end}"].transpose("direction", "side", "score").values[k, :, s]
                    for end in ("", "_low", "_high")]  # fmt: skip
            marks = [[side * end for end in found] for side, *found in zip(sides, *ends, strict=True)]
            basin_panels.draw_marks(axes[panel], edge, marks, look, small=several)
    units = appearance.escaped(str(data["t"].attrs.get("units", "1")))
    basin_panels.finish(axes, data, f"position on the line ({units})", values)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per result: losses on the left, accuracies on the right."""
    return basin_panels.page(results, looks, draw)

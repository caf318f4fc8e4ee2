"""Draw scores of several data sets over the distance from a checkpoint on a plane, with the radii of their basins."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import appearance, basin_panels
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Loss and accuracy on every data set over the distance from the checkpoint: averaged over the directions of the "
    "plane (thick), and in the worst of them (thin), with the distance up to which each stays within its interval "
    "(dotted). The worst direction of a plane is far from the worst of weight space, and the radius depends on the "
    "margin and on how long the directions are made."
)
NOTE = "Thick, filled: mean over the plane's directions; thin, hollow: the worst of them."


def draw(
    data: xr.Dataset, axes: tuple[Axes, ...], *, known: Mapping[tuple[str, str], Look] | None = None
) -> tuple[Axes, ...]:
    """Draw losses (first axes) and accuracies (second) of all data sets; `known`: looks by data set."""
    known = known or basin_panels.styles([data])
    r = data["distance"].values
    values: list[list[np.ndarray]] = [[], []]
    for ax in axes:
        ax.set_xlim(0.0, max(float(r[-1]), 1e-12))
    for s, panel, look, edge in basin_panels.scores(data, known, axes):
        ax, sign, centre = axes[panel], basin_panels.sign(data, s), float(data["score_centre"].values[s])
        for profile, basin in (("profile_mean", "basin_mean"), ("profile_most", "basin_least")):
            worst = basin == "basin_least"
            worse, half = (
                found.transpose("distance", "score").values[:, s]
                for found in (data[profile], basin_panels.half_width(data, profile))
            )
            with np.errstate(invalid="ignore"):
                value = centre + sign * worse
            values[panel].append(value)
            curve = replace(look, line=":") if worst else look
            basin_panels.draw_curve(ax, r, value, np.full(len(r), np.nan) if worst else half, curve, thin=worst)
            mark = [float(data[f"{basin}{end}"].values[s]) for end in ("", "_low", "_high")]
            basin_panels.draw_marks(ax, edge, [mark], look, hollow=worst)
    units = appearance.escaped(str(data["x"].attrs.get("units", "1")))
    basin_panels.finish(axes, data, f"distance from the checkpoint ({units})", values)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per result: losses on the left, accuracies on the right."""
    return basin_panels.page(results, looks, draw, NOTE)

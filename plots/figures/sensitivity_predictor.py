"""Draw the measured loss increase of perturbed units over the predictor of HAWQ-V2, with rank correlations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.sensitivity import hues_of, units_of

MEANING = (
    "The loss increase that was measured for each unit over the mean trace of its Hessian block times the squared "
    "change of its weights, which needs no evaluation; Spearman's rank correlation over units says how well it "
    "orders them. The predictor is no estimate of the increase itself: it leaves out the gradient and all but the mean "
    "curvature."
)
ROOM = 0.42  # of the height, above the points, for the legend
NOTE = "In brackets: 95 % interval of the rank correlation over units. Open triangles: not above 0, at the edge."


def draw(data: xr.Dataset, ax: Axes, *, hues: Mapping[str, tuple[Any, str]] | None = None) -> Axes:
    """Draw a point per unit and setting; units whose predictor or increase is not positive are at the edge."""
    hues = hues or hues_of([data])
    x, y = (data[name].transpose("unit", "setting").values for name in ("predictor", "loss_increase"))
    known = np.isfinite(x) & np.isfinite(y)
    above = known & (x > 0) & (y > 0)
    positive = [values[known & (values > 0)] for values in (x, y)]
    low = [float(values.min()) / 2 if values.size else 1.0 for values in positive]
    for s, name in enumerate(map(str, data["setting_name"].values)):
        color, marker = hues[name]
        numbers = [float(data[f"rank_correlation{end}"].values[s]) for end in ("", "_low", "_high")]
        label = f"{name}: {numbers[0]:.2f}" if np.isfinite(numbers[0]) else name
        label += f" [{numbers[1]:.2f}, {numbers[2]:.2f}]" if np.isfinite(numbers[1]) else ""
        drawn, edge = above[:, s], known[:, s] & ~above[:, s]
        ax.plot(x[drawn, s], y[drawn, s], marker, color=color, markersize=3, linestyle="none", label=label)
        ax.plot(
            np.where(x[edge, s] > 0, x[edge, s], low[0]), np.where(y[edge, s] > 0, y[edge, s], low[1]), "v",
            color=color, markersize=3, markerfacecolor="none", linestyle="none", alpha=0.7,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="mean trace × squared change", ylabel=f"loss increase ({units_of(data)})")
    top = float(positive[1].max()) if positive[1].size else 10.0
    ax.set_ylim(low[1] / 1.5, top * (top / low[1]) ** (ROOM / (1 - ROOM)))
    ax.legend(fontsize=style.SMALL, loc="upper left", title="rank correlation", title_fontsize=style.SMALL,
              labelcolor=theme.ink(), handletextpad=0.3, borderaxespad=0.3)  # fmt: skip
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A panel per network."""
    figure, axes = style.panels(results, looks, aspect=0.6 if theme.narrow() else 0.95, note=NOTE, share=False, most=3)
    hues = hues_of(results)
    for data, ax in zip(results, axes, strict=True):
        draw(data, ax, hues=hues)
    style.label_outer(axes, same=False)
    return figure

"""Draw the barriers between every two checkpoints as a heat map with its values, as they are and aligned."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import differences, style, theme
from landscape.plots.appearance import escaped
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import rounding, stored

MEANING = (
    "How far the loss rises above the straight line between its values at every two checkpoints: small everywhere "
    "means one basin, and blocks mean several. The straight line is one path: where it has a barrier a curved one may "
    "have none, and a matrix of pairs does not see regions between three checkpoints."
)
NOTED = 8  # checkpoints up to which the values are written; in one column of a paper 4


def draw(data: xr.Dataset, ax: Axes, *, curve: int | None = None, top: float | None = None) -> Axes:
    """Draw one matrix, by default the last curve's; values with 95 % intervals stand in the cells of small ones."""
    curve = data.sizes["curve"] - 1 if curve is None else curve
    values, halves = data["barrier_matrix"].values[curve], stored.half_width(data, "barrier_matrix")[curve]
    shown = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    finite_values = shown[np.isfinite(shown)]
    top = top if top is not None else max(float(finite_values.max(initial=0.0)), 1e-12)
    ax.imshow(np.where(np.isfinite(shown), shown, np.nan), cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    names = [escaped(name) for name in told_apart([str(name) for name in data["checkpoint_name"].values])]
    places = range(len(names))
    ax.set_xticks(places, [str(i + 1) for i in places], fontsize=style.SMALL)
    ax.set_yticks(places, [f"{name}  {i + 1}" for i, name in enumerate(names)], fontsize=style.SMALL)
    for i, j in np.argwhere(np.isfinite(shown)) if len(names) <= NOTED // (1 + theme.narrow()) else ():
        known = np.isfinite(halves[i, j])
        text = rounding.plus_minus(values[i, j], halves[i, j]).replace(" ± ", "\n±") if known else _digits(values[i, j])
        dark = shown[i, j] < 0.6 * top
        ax.text(j, i, text, ha="center", va="center", fontsize=style.SMALL, color="w" if dark else "k")
    ax.tick_params(length=0)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per set of checkpoints, or two, one matrix per curve, all on one scale."""
    count = max(data.sizes["curve"] for data in results)
    columns = min(count, 2)
    rows = -(-count // columns)  # per set
    note = "Numbers of checkpoints on both axes; in the cells the barrier. Below it: its 95 % interval over samples."
    height = (theme.page_width() - 1.0) / columns + 0.45 if theme.narrow() else 2.6 if columns == 1 else 2.3
    figure = style.page(results, looks, height=height * rows * len(results), note=note)
    grid = figure.subplots(rows * len(results), columns, squeeze=False).reshape(len(results), -1)
    values = np.concatenate([data["barrier_matrix"].values.ravel() for data in results])
    top = max(float(values[np.isfinite(values)].max(initial=0.0)), 1e-12)
    for axes, data, look in zip(grid, results, looks, strict=True):
        for k, ax in enumerate(axes):
            if k >= data.sizes["curve"]:
                ax.remove()
                continue
            draw(data, ax, curve=k, top=top)
            ax.set_title(
                style.fitted(escaped(str(data["name"].values[k])), (theme.page_width() - 1.0) / columns, style.SMALL),
                fontsize=style.SMALL,
            )
            if k % columns:
                ax.set_yticklabels([str(i + 1) for i in range(data.sizes["checkpoint"])])
        if len(results) > 1:
            axes[0].set_ylabel(style.fitted(look.label, 2.2 * rows, style.RC["axes.labelsize"]))
    label = f"barrier ({results[0]['barrier'].attrs.get('units', '1')})"
    style.colour_bar(figure, figure.axes, (0, top), "viridis", label, aspect=20 * len(results), pad=0.05)
    return figure


def _digits(value: float) -> str:
    """A barrier without a known error, short enough for its cell."""
    return f"{value:.{3 - theme.narrow() - (theme.narrow() and value < 0.1)}g}"


def told_apart(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with."""
    if len(names) < 2:
        return differences.shortened(names)
    same = next((i for i, letters in enumerate(zip(*names)) if len(set(letters)) > 1), 0)  # noqa: B905
    start = max(names[0].rfind(mark, 0, same) for mark in "-_/ ") + 1
    return differences.shortened([name[start:] or name for name in names])

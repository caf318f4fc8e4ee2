"""Draw a quantity per layer over normalised depth, with bands at self-attentions and at reductions of the map."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Draw, Figure, Look
from landscape.plots.theme import ground
from landscape.statistics.stored import error_of, half_width

STRIP = 0.045  # share of the height of axes of the strip of one of several networks
STRIPS = "Strips above: attention filled, reductions hollow."
ERRORS = "Error bars: 95 % intervals over samples."
NOTE = f"Bands: self-attention (grey), blocks that reduce the map (blue), smoothing (green, hollow). {ERRORS}"


def over_depth(data: xr.Dataset, ax: Axes, quantity: str, *, look: Look, shade: bool = True) -> Axes:
    """Draw a quantity per layer with its 95 % interval at each layer's depth.

    Layers without a map are omitted, and the line is broken where they lie; smoothing blocks are hollow.
    """
    shown = data[quantity].notnull().values
    depth, values = data["depth"].values[shown], data[quantity].values[shown]
    error = error_of(data, quantity)[shown] if f"{quantity}_se" in data else np.zeros_like(values)
    half = np.broadcast_to(half_width(data, quantity), shown.shape)[shown]
    at = _gaps(data["depth"].values[shown])
    ax.errorbar(
        np.insert(depth, at, np.nan), np.insert(values, at, np.nan), yerr=np.insert(broken.bar(half), at, np.nan),
        **look.cues, elinewidth=0.8, markersize=3.5 if shown.sum() <= 30 else 2, label=look.label,
    )  # fmt: skip
    broken.mark(ax, depth, values, error)
    smooth = (data["kind"].values == "smoothing")[shown] if "kind" in data else np.zeros_like(values, dtype=bool)
    ax.plot(
        depth[smooth], values[smooth], color=look.color, marker=look.marker, linestyle="", markerfacecolor=ground(),
        markersize=3.5 if shown.sum() <= 30 else 2, zorder=5,
    )  # fmt: skip
    ax.set(xlabel="normalised depth", xlim=(-0.03, 1.03))
    return bands(data, ax) if shade else ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, *, note: str = NOTE) -> Figure:
    """One panel per network on common axes; for several networks, one more with all of them, their bands as strips."""
    several = len(results) > 1
    also, legend = (["all networks"], looks) if several else ([], [])
    note += f" {STRIPS}" * several
    figure, axes = style.panels(results, looks, aspect=0.85, note=note, also=also, legend=legend)
    for data, ax, look in zip(results, axes, looks, strict=False):
        draw(data, ax, look=look)
        if several:
            draw(data, axes[-1], look=look, shade=False)
    if several:
        strips(results, looks, axes[-1])
    style.label_outer(axes)
    return figure


def _gaps(depth: np.ndarray) -> np.ndarray:
    """Positions before which layers are missing: all layers of a network are equally far apart."""
    steps = np.diff(depth)
    return np.flatnonzero(steps > 1.5 * steps.min()) + 1 if steps.size else np.array([], dtype=int)


def bands(data: xr.Dataset, ax: Axes) -> Axes:
    """Shade each attention unit grey, each reduction blue and each smoothing block green.

    Unit m of D spans [(m - 1)/D, m/D].
    """
    depth = data["depth"].values
    for i in range(1, len(depth)):
        if data["kind"].values[i] == "msa":
            ax.axvspan(depth[i - 1], depth[i], color="0.5", alpha=0.15, linewidth=0)
        if data["kind"].values[i] == "subsample" or data["reduces"].values[i]:
            ax.axvspan(depth[i - 1], depth[i], color="tab:blue", alpha=0.15, linewidth=0)
        if data["kind"].values[i] == "smoothing":
            ax.axvspan(depth[i - 1], depth[i], color="tab:green", alpha=0.15, linewidth=0)
    return ax


def strips(results: Sequence[xr.Dataset], looks: Sequence[Look], ax: Axes) -> None:
    """Show the bands of several networks in their colours, a strip each below the upper edge of the axes."""
    kinds = [(data, look) for data, look in zip(results, looks, strict=True) if "kind" in data]
    style.add_headroom(ax, STRIP * (len(kinds) + 1))
    for row, (data, look) in enumerate(kinds, start=1):
        depth, top = data["depth"].values, 1.0 - STRIP * (row - 1)
        for i in range(1, len(depth)):
            attends = data["kind"].values[i] == "msa"
            if attends or data["kind"].values[i] == "subsample" or data["reduces"].values[i]:
                ax.axvspan(
                    depth[i - 1], depth[i], top - 0.8 * STRIP, top, edgecolor=look.color, linewidth=0.5,
                    facecolor=look.color if attends else "none",
                )  # fmt: skip


def color(depth: float) -> tuple[float, float, float, float]:
    """The colour of a normalised depth, dark to bright; the end of the colour map is too bright on white."""
    from matplotlib import colormaps

    return colormaps["plasma"](0.95 * depth)


def color_bar(figure: Figure, axes: Sequence[Axes] | np.ndarray, *, aspect: float) -> None:
    """Add the colour bar of `color` beside some axes."""
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([color(i / 255) for i in range(256)])
    style.colour_bar(figure, axes, (0, 1), colours, "normalised depth", aspect=aspect)

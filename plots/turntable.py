"""Turn the reliefs of several networks together: smooth, on one capped scale, with the path of training on them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr
from scipy.interpolate import RegularGridInterpolator

from landscape.plots import plane, style, theme
from landscape.plots.figure import Look
from landscape.plots.figures import surface_relief

MOST = 6  # surfaces side by side
FRAMES = 36  # of one turn
LIFT = 0.02  # of the vertical axis, by which the path lies above the relief


def frames(results: Sequence[xr.Dataset], looks: Sequence[Look], dpi: int) -> Iterator[np.ndarray]:
    """The pictures of one turn, (height, width, 3) of bytes."""
    span = plane.bowl_range(results, surface_relief.SHARE)
    note = surface_relief.scale(results, span)
    note += " Black: the path of training." * any(map(_has_path, results))
    columns = min(len(results), 3)
    rows, side = -(-len(results) // columns), theme.page_width() / columns
    figure = style.page(results, looks, height=0.9 * side * rows, note=note)
    figure.set_dpi(dpi)
    axes = [figure.add_subplot(rows, columns, i + 1, projection="3d") for i in range(len(results))]
    for ax, data, look in zip(axes, results, looks, strict=True):
        surface_relief.draw(data, ax, span=span)
        _path(data, ax, span)
        size = style.title_size(columns)
        ax.set_title(style.fitted(look.label, side, size), fontsize=size)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for angle in np.linspace(0, 360, FRAMES, endpoint=False):
        for ax in axes:
            ax.view_init(elev=28, azim=angle - 60)
        figure.canvas.draw()
        pixels: Any = figure.canvas
        yield np.asarray(pixels.buffer_rgba())[..., :3].copy()


def _has_path(data: xr.Dataset) -> bool:
    return {"path_x", "path_y"} <= set(data) and data.attrs.get("plane") != "checkpoints"


def _path(data: xr.Dataset, ax: Any, span: tuple[float, float]) -> None:
    """The path of training on the relief, where the plane holds one and as far as it lies inside."""
    if not _has_path(data):
        return
    made = surface_relief.smooth(data, span)
    height = RegularGridInterpolator(
        (made["x"].values, made["y"].values), made["loss"].transpose("x", "y").values, bounds_error=False
    )
    x, y = data["path_x"].values, data["path_y"].values
    z = height(np.stack([x, y], axis=-1))
    low, high = span
    z, low, high = (np.log10(v) for v in (z, low, high)) if low > 0 else (z, low, high)
    z = z + LIFT * (high - low)
    ax.plot(x, y, z, color=theme.ink(), marker=".", markersize=3, linewidth=1, zorder=10)

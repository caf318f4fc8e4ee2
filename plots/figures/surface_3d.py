"""Draw the loss surface as a wire mesh in the style of Park & Kim 2022, Fig. 1a."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, plane, style, theme
from landscape.plots.figure import Figure, Look

MEANING = (
    "The loss surface as a mesh seen from the side, on one vertical scale for all panels: it shows at a "
    "glance which valley is wider. A perspective view has no readable numbers; take those from the contours."
)
LINES = 41  # mesh lines per axis at most
SHARE = 0.9  # of the cells that are below the upper end of the vertical axis


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw the loss over the plane as a wire mesh coloured by height; axes off, elevation and azimuth 15 degrees.

    Cells above the span of the vertical axis (default: from the data) are left out. Heights are logarithmic where the
    span is wide: else the valley of one network would be a flat sheet beside that of another.
    """
    import matplotlib
    from matplotlib.colors import Normalize

    low, high = span or plane.vertical_range([data], SHARE)
    logarithmic = is_logarithmic((low, high))
    x, y = (_thinned(data[name].values) for name in ("x", "y"))
    loss = data["loss"].transpose("y", "x").values[np.ix_(y, x)]
    loss = np.where(np.isfinite(loss) & (loss <= high), loss, np.nan)
    if logarithmic:
        loss, low, high = np.log10(loss), math.log10(low), math.log10(high)
    height = Normalize(low, high)(np.nan_to_num(loss, nan=high))
    colors = matplotlib.colormaps["plasma"](0.3 + 0.7 * height if theme.dark() else height)  # its lower end is dark
    corners = np.meshgrid(data["x"].values[x], data["y"].values[y])
    mesh = ax.plot_surface(*corners, loss, rstride=1, cstride=1, facecolors=colors, shade=False, linewidth=0.5)
    mesh.set_facecolor((0, 0, 0, 0))
    mesh.set_rasterized(True)
    if not plane.complete_cells(loss).any():
        plane.say_too_few_points(ax)
    ax.set_zlim(low, high)
    ax.view_init(elev=15, azim=15)
    ax.set_box_aspect((1, 1, 0.8), zoom=1.3)
    ax.set_axis_off()
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One mesh per result on a common vertical scale."""
    span = plane.bowl_range(results, SHARE)
    scale = f"{appearance.loss_label(results)} from {span[0]:.3g} to {span[1]:.3g}"
    kind = ", logarithmic" if is_logarithmic(span) else ""
    note = f"Vertical axis and colour: {scale}{kind}; cells above are left out."
    return plane.page_3d(results, looks, partial(draw, span=span), aspect=0.8, note=note)


def is_logarithmic(span: tuple[float, float]) -> bool:
    """Whether heights of a span are logarithmic."""
    return style.is_wide(np.array(span))


def _thinned(values: np.ndarray) -> np.ndarray:
    """Positions of evenly spread coordinates, both ends included."""
    return np.unique(np.linspace(0, len(values) - 1, min(len(values), LINES)).round().astype(int))

"""Draw the loss around images: its mean on the planes of all images, and its rise along every direction."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, broken, plane, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import surface
from landscape.statistics.stored import error_of, half_width

MEANING = (
    "The mean loss when every image is moved along directions of its own (cross: the images as they are): a steep rise "
    "along the gradient beside a flat one at random is what adversarial images use. Pixels leave the range of pictures "
    "further out, and a flat loss along a gradient may also come from saturated or masked gradients."
)
NOTE = "Bands: 95 % intervals over images, paired with the intact ones."
NAMES = {
    "gradient of the image's loss": "gradient",
    "sign of the gradient": "sign of gradient",
    "towards the image that PGD finds": "PGD",
    "random": "random",
}
MARKS: tuple[tuple[str, str, Any], ...] = (
    ("C0", "o", "-"),
    ("C1", "s", "--"),
    ("C2", "^", "-."),
    ("C3", "D", ":"),
)  # colour, marker, line
SHOWN_MARKERS = 5  # per line


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, levels: np.ndarray | None = None) -> tuple[Axes, ...]:
    """Draw contours of the mean loss on the plane (first axes, where there is a plane), and the rises (last axes)."""
    if len(axes) > 1:
        draw_plane(data, axes[0], levels=levels)
    draw_lines(data, axes[-1])
    return axes


def draw_plane(data: xr.Dataset, ax: Axes, *, levels: np.ndarray | None = None) -> Axes:
    """Draw contours of the mean loss on the plane; a note where a result has lines alone."""
    if "loss" not in data or not np.isfinite(data["loss"].values).any():
        style.write_centred(ax, "no plane" if "loss" not in data else "no finite loss", va="center", fontsize=7)
        return ax
    draw_contours(data, data["loss"], ax, levels)
    return ax


def draw_contours(data: xr.Dataset, loss: xr.DataArray, ax: Axes, levels: np.ndarray | None) -> None:
    """Draw filled contours of a loss on the plane of the images, which a colour bar explains, and name its axes."""
    view = plane_of(data, loss)
    levels = surface.contour_levels([view]) if levels is None else levels
    shown = surface.fill_contours(view, ax, levels)
    within = levels[(levels > shown.min()) & (levels < shown.max())]
    at_x, at_y = data["x"].values, data["y"].values
    if within.size and plane.complete_cells(shown.filled(np.nan)).any():
        ax.contour(at_x, at_y, shown, levels=within, colors="k", linewidths=0.35)
    ax.plot(0.0, 0.0, "+", color="w", markersize=5, markeredgewidth=1)
    x, y = (NAMES.get(str(name), str(name)) for name in data["direction_name"].values[:2])
    ax.set(xlabel=x, ylabel=f"{y}, orthogonal", xlim=(at_x[0], at_x[-1]), ylim=(at_y[0], at_y[-1]), aspect="equal")


def draw_lines(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw the rise of the loss along every direction with its band."""
    t, data = data["t"].values, data.transpose("direction", "t", ...)
    lines = data["line_rise"].values, error_of(data, "line_rise"), half_width(data, "line_rise")
    for i, name in enumerate(data["direction_name"].values):
        color, marker, line = MARKS[i % len(MARKS)]
        rise, error, half = (part[i] for part in lines)
        shown = np.isfinite(rise)
        margin = broken.bar(half[shown])
        ax.fill_between(t[shown], rise[shown] - margin, rise[shown] + margin, color=color, alpha=0.18, linewidth=0)
        every = max(1, len(t) // SHOWN_MARKERS)
        ax.plot(t[shown], rise[shown], color=color, linestyle=line, marker=marker, markevery=(i % every, every),
                markersize=3, label=NAMES.get(str(name), str(name)))  # fmt: skip
        broken.mark(ax, t, rise, error)
    ax.axhline(0.0, color=theme.muted(), linewidth=0.6, zorder=0)
    ax.set(xlabel="RMS change of a pixel", ylabel=appearance.loss_label([data], "rise of the loss"), xlim=(t[0], t[-1]))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """The plane of every network, with common contours, and its lines."""
    from matplotlib.lines import Line2D

    planes = [plane_of(data, data["loss"]) for data in results if "loss" in data]
    planes = [data for data in planes if np.isfinite(data["loss"].values).any()]
    names = list(dict.fromkeys(str(name) for data in results for name in data["direction_name"].values))
    legend = [
        Line2D([], [], color=color, marker=marker, linestyle=line, markersize=3, label=NAMES.get(name, name))
        for name, (color, marker, line) in zip(names, MARKS, strict=False)
    ]
    rows = 2 if planes else 1
    shown = f"{NOTE} Coordinates: root mean square change of a pixel in [0, 1]."
    figure, grid, columns = style.by_network(results, looks, rows, len(results), height=2.1, legend=legend, note=shown)
    levels = surface.contour_levels(planes) if planes else None
    for column, data, look in zip(grid.T, results, looks, strict=True):
        if planes:
            draw_plane(data, column[0], levels=levels)
        draw_lines(data, column[-1])
        across = len(results) if columns else rows
        column[0].set_title(style.fitted(look.label, theme.page_width() / across, style.title_size(across)))
    for row in grid:
        style.label_outer(list(row), same=columns)
    if levels is not None:
        below: dict[str, Any] = {} if columns else {"location": "bottom"}
        surface.add_colour_bar(figure, list(grid[0] if columns else grid.flat), results, levels, **below)
    return figure


def plane_of(data: xr.Dataset, loss: xr.DataArray) -> xr.Dataset:
    """A loss on the plane of the images as the contours of surfaces take it."""
    finished = xr.ones_like(loss.transpose("x", "y"))
    return xr.Dataset({"loss": loss, "done": finished}, {"x": data["x"], "y": data["y"]}).assign_attrs(data.attrs)

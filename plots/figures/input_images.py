"""Draw the loss of single images on their planes, with the border of the correct prediction."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import input_surface, surface

MEANING = (
    "The loss of single images when their pixels move along two directions of their own; the white line encloses the "
    "pixels for which the prediction is correct, the cross is the image itself. Each panel is one image out of many: "
    "the mean over all of them is in the figure of input surfaces."
)
NOTE = "White line: border of the correct prediction; coordinates: root mean square change of a pixel in [0, 1]."
MOST = 6  # images of a network; in one column of a paper two


def draw(data: xr.Dataset, ax: Axes, *, image: int = 0, levels: np.ndarray | None = None) -> Axes:
    """Draw contours of one image's loss, and where its prediction changes between right and wrong."""
    losses = data["image_loss"].isel(image=image)
    if not np.isfinite(losses.values).any():
        style.write_centred(ax, "not measured yet" if np.isnan(losses.values).all() else "no finite loss", va="center",
                            fontsize=7)  # fmt: skip
        return ax
    input_surface.draw_contours(data, losses, ax, levels)
    right = data["image_accuracy"].isel(image=image).transpose("y", "x").values
    if (right < 0.5).any() and (right >= 0.5).any():
        ax.contour(data["x"].values, data["y"].values, right, levels=[0.5], colors="w", linewidths=1.1)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per network, a column per image, with common levels."""
    views = [
        input_surface.plane_of(data, losses)
        for data in results
        for losses in data["image_loss"].isel(image=slice(MOST))
        if np.isfinite(losses.values).any()
    ]
    columns = min(2 if theme.narrow() else MOST, max(data.sizes["image"] for data in results))
    side = (theme.page_width() - 0.55) / (columns if theme.narrow() else max(columns, 3))
    figure = style.page(results, looks, height=(side + 0.25) * len(results), note=NOTE)
    grid = figure.subplots(len(results), columns, squeeze=False, sharex=True, sharey=True)
    levels = surface.contour_levels(views) if views else None
    for row, data, look in zip(grid, results, looks, strict=True):
        for i, ax in enumerate(row):
            if i < data.sizes["image"]:
                draw(data, ax, image=i, levels=levels)
            else:
                ax.set_axis_off()
        row[0].set_title(style.fitted(look.label, 6.0 / columns, style.title_size(columns)), loc="left")
    style.label_outer(list(grid.flat))
    if levels is not None:
        surface.add_colour_bar(figure, list(grid.flat), results, levels)
    return figure

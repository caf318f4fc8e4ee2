"""Draw where chosen positions of an image attend, layer by layer (Park et al. 2023, Fig. 1)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.theme import narrow, page_width

MEANING = (
    "Where the position marked by a cross attends, mean over heads, each map scaled to its own largest weight: maps "
    "that do not change with the query show that all positions attend alike. A few images and positions illustrate "
    "what the attention distance and the mutual information measure over many."
)
COLUMNS, IMAGES = 6, 2  # layers and images shown at most
COLORS = "inferno"


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw a row per image and query: the image, then the maps of layers from the first to the last."""
    from matplotlib import colormaps

    layers = np.unique(np.linspace(0, len(data["layer"]) - 1, COLUMNS).round().astype(int))
    attention = data["attention"].transpose("image", "query", "layer", "row", "column").values[:IMAGES]
    rows, places = [], []
    for k, queries in enumerate(attention):
        for maps, place in zip(queries, data["place"].values, strict=True):
            picture = data["picture"].transpose("image", "pixel_row", "pixel_column", "channel").values[k]
            cells: list[np.ndarray | None] = [np.nan_to_num(picture, posinf=1.0, neginf=0.0)]
            for one in maps[layers]:
                one = np.where(np.isfinite(one), one, np.nan)
                known = one[np.isfinite(one).any(axis=1)][:, np.isfinite(one).any(axis=0)]
                cells.append(colormaps[COLORS](known / np.nanmax(known))[..., :3] if known.size else None)
            rows.append(cells)
            places.append(place)
    names = [f"{depth:.2f}" if narrow() else f"depth {depth:.2f}" for depth in data["depth"].values[layers]]
    style.mosaic(ax, rows, ["image", *names], [""] * len(rows))
    for i, (y, x) in enumerate(places):
        for j in range(len(layers) + 1):
            ax.plot(j + 0.03 + 0.94 * x, i + 0.03 + 0.94 * y, "+", color="w" if j else "r", markersize=4)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """The networks one below the other."""
    rows = [min(IMAGES, len(data["image"])) * len(data["query"]) for data in results]
    height = sum(rows) * page_width() / (COLUMNS + 1) + 0.3 * len(rows)
    shown = max(min(IMAGES, len(data["image"])) for data in results)
    note = f"Drawn: the first {shown} of them. Cross: the query."
    figure = style.page(results, looks, height=height, note=note)
    grid = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": rows})
    for data, look, ax in zip(results, looks, grid[:, 0], strict=True):
        draw(data, ax)
        ax.set_title(style.fitted(look.label, page_width(), style.SMALL + 1), fontsize=style.SMALL + 1, loc="left")
    widest = max(ax.get_xlim()[1] for ax in grid[:, 0])
    for ax in grid[:, 0]:
        ax.set_xlim(0, widest)  # pictures of one size, however many layers a network has
    return figure

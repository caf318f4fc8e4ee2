"""Draw the tokens of some images in the plane of t-SNE, coloured by image (Park et al. 2023, Fig. 4)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Every point is a token, its colour the image: groups of one colour mean that tokens encode the image they are of, "
    "mixed colours that they encode their own content. t-SNE keeps neighbours and not distances, so sizes of "
    "groups and gaps between them mean nothing."
)
KEY = 40  # images up to which a key says which is which
MARKERS = "osD^vP*Xp<>"  # as many as are told apart at this size; 11 and the 20 colours have no common divisor


def draw(data: xr.Dataset, ax: Axes, *, layer: int = -1) -> Axes:
    """Draw the tokens of one layer, by default of the last."""
    position = data["position"].transpose("layer", "image", "token", "coordinate").values[layer]
    for k, tokens in enumerate(position):
        x, y = tokens[np.isfinite(tokens).all(axis=1)].T
        look = _look(k)
        ax.scatter(x, y, s=4, color=look.color, marker=look.marker, linewidths=0, alpha=0.8)
    ax.set(xticks=[], yticks=[])
    ax.set_title(f"depth {float(data['depth'].values[layer]):.2f}", fontsize=style.SMALL, loc="right")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """A row per network, a column per layer."""
    images = max(data.sizes["image"] for data in results)
    legend = [_look(k) for k in range(images)] if images <= KEY else []
    return layers_in_rows(
        results, looks, draw, titles=0.15, note="Colours and shapes: images by number.", legend=legend
    )


def _look(image: int) -> Look:
    """The colour and the marker of an image."""
    from matplotlib import colormaps

    return Look(str(image + 1), colormaps["tab20"](image % 20)[:3], MARKERS[image % len(MARKERS)], " ")


def layers_in_rows(
    results: Sequence[xr.Dataset],
    looks: Sequence[Look],
    draw: Callable[..., Any],
    *,
    titles: float,
    projection: str | None = None,
    note: str = "",
    legend: Sequence[Any] = (),
) -> Figure:
    """Panels of `draw(data, ax, layer=i)`: a row per network, named at its left, a column per layer.

    `titles` is the height of the titles of a row, in inches.
    """
    columns = max(len(data["layer"]) for data in results)
    side = theme.page_width() / max(columns, 3)
    figure = style.page(results, looks, height=len(results) * (side + titles), legend=legend, note=note)
    grid = figure.subplots(len(results), columns, squeeze=False, subplot_kw={"projection": projection})
    for data, look, row in zip(results, looks, grid, strict=True):
        for layer, ax in enumerate(row):
            if layer < len(data["layer"]):
                draw(data, ax, layer=layer)
            else:
                ax.remove()
        name: dict[str, Any] = {"s": style.fitted(look.label, side, style.SMALL), "fontsize": style.SMALL}
        if projection == "3d":  # which has no vertical label of its own
            row[0].text2D(0.0, 0.5, **name, transform=row[0].transAxes, rotation=90, va="center", ha="right")
        else:
            row[0].set_ylabel(name.pop("s"), **name)
    return figure

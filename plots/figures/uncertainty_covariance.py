"""Draw the covariance of feature maps with their centre, for random input and for data (Park & Kim 2022, "Blurs")."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.theme import missing, narrow, page_width

MEANING = (
    "How the points of a feature map vary with its centre over images, relative to the centre's own variance, for "
    "independent Gaussian pixels and for the data: a broad spot means that neighbours carry the same information. "
    "Random input shows what the network adds, which smoothing blocks widen; images bring correlations of their own."
)
INPUTS = {"gaussian": "Gaussian input", "data": "data"}
HEIGHT = 1.15  # inches of a row
MOST = 6  # layers in a row


def draw(data: xr.Dataset, ax: Axes, *, layer: int = 0, name: str = "gaussian") -> Axes:
    """Draw the covariance of one layer as a picture, from -1 to 1."""
    values = data[f"{name}_covariance"].values[layer]
    side = data["row"].values.max() + 0.5
    ax.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, extent=(-side, side, side, -side), interpolation="nearest")
    ax.set_facecolor(missing())
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Two rows per network, of Gaussian input and of data, with up to six layers each."""
    columns = min(MOST // 2 if narrow() else MOST, max(data.sizes["layer"] for data in results))
    size = style.SMALL
    reach = {int(data["row"].values.max()) for data in results}
    note = f"Positions up to {', '.join(map(str, sorted(reach)))} from the centre; grey lies outside of the map."
    figure = style.page(results, looks, height=(HEIGHT + 0.12) * 2 * len(results), note=note)
    axes = figure.subplots(2 * len(results), columns, squeeze=False)
    for k, (data, look) in enumerate(zip(results, looks, strict=True)):
        chosen = layers(data, columns)
        for row, name in enumerate(INPUTS):
            for ax, layer in zip(axes[2 * k + row], chosen, strict=False):
                draw(data, ax, layer=layer, name=name)
                kind, module = str(data["kind"].values[layer]), str(data["name"].values[layer])
                ax.set_title(style.fitted(f"{module} ({kind})", 0.88 * page_width() / columns, size, 2), fontsize=size)
            for ax in axes[2 * k + row, len(chosen) :]:
                ax.remove()
            text = f"{look.label}, {INPUTS[name]}" if len(results) > 1 else INPUTS[name]
            axes[2 * k + row, 0].set_ylabel(style.fitted(text, HEIGHT, size), fontsize=size)
    kept = [ax for ax in axes.flat if ax.figure is not None] or None
    style.colour_bar(figure, kept, (-1, 1), "RdBu_r", "covariance with the centre / its variance", pad=0.01)
    return figure


def layers(data: xr.Dataset, most: int) -> list[int]:
    """The layers to draw: those before and after smoothing blocks, filled up with others at equal distances."""
    finite = np.flatnonzero(np.isfinite(data["data_covariance"].values).any(axis=(1, 2)))
    smooth = [i for i in finite if data["kind"].values[i] == "smoothing"]
    chosen = sorted({int(j) for i in smooth for j in (i - 1, i) if j in finite})[:most]
    for i in np.linspace(0, len(finite) - 1, min(most, len(finite))).round().astype(int):
        if len(chosen) < most and int(finite[i]) not in chosen:
            chosen.append(int(finite[i]))
    return sorted(chosen)

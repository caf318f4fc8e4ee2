"""Draw the similarity of every two layers as a heat map with the stages marked (Nguyen et al. 2021)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "How alike two layers represent the same images, by centred kernel alignment: 1 is the same up to rotation and "
    "scale, 0 is unrelated, and blocks are stretches of layers that change little. It compares what separates these "
    "images from each other, so a few directions may dominate it, and it does not say which layer is better."
)
MAP = "viridis"
NOTE = "Lines separate the stages; E: stem, P: the map gets smaller."


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw the CKA of every layer (rows) with every other (columns), shallow layers at the lower left."""
    values = data["cka"].values
    ax.imshow(values, origin="lower", cmap=MAP, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    for axis, prefix, rule in (("layer", "", ax.axhline), ("other", "other_", ax.axvline)):
        stages = data[f"{prefix}stage"].values
        for i in np.flatnonzero(np.diff(stages)):
            rule(i + 0.5, color="w", linewidth=0.6)
        count = data.sizes[axis]
        letters = _letters(data, prefix)
        step = max(1, int(np.ceil(count / 10)))
        places = sorted({*range(0, count, step), *letters})
        spaced = [i for i in places if i in letters or all(abs(i - j) >= 0.6 * step for j in letters)]
        names = [letters.get(i, str(i)) for i in spaced]
        setter: Any = ax.set_yticks if axis == "layer" else ax.set_xticks
        setter(spaced, names)
    other = str(data.attrs.get("against", ""))
    ax.set(ylabel="layer", xlabel=f"layer of {appearance.escaped(other)}" if other else "layer")
    ax.tick_params(length=2)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One square panel per network, or pair of networks, on one scale."""
    looks = [replace(look, label=_title(data, look)) for data, look in zip(results, looks, strict=True)]
    figure, axes = style.panels(results, looks, aspect=0.95, note=NOTE, share=False)
    for data, ax in zip(results, axes, strict=True):
        draw(data, ax)
        ax.xaxis.label.set_text(style.fitted(ax.get_xlabel(), ax.get_position().width * figure.get_figwidth(), 8))
    style.colour_bar(figure, axes, (0, 1), MAP, "centred kernel alignment")
    return figure


def _title(data: xr.Dataset, look: Look) -> str:
    """The network's name without the path of the other network, whose name stands below the panel."""
    label = appearance.escaped(str(data.attrs.get("label", "")))
    return label if look.label.startswith(f"{label} (against") else look.label


def _letters(data: xr.Dataset, prefix: str) -> dict[int, str]:
    """E for the stem and P where the map gets smaller."""
    kinds, reduces = data[f"{prefix}kind"].values, data[f"{prefix}reduces"].values
    found = {int(i): "P" for i in np.flatnonzero((kinds == "subsample") | (reduces == 1))}
    return found | {int(i): "E" for i in np.flatnonzero(kinds == "stem")}

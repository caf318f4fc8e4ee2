"""Draw how different the members of an ensemble are: disagreement of their classes, CKA of their representations."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, differences, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.theme import narrow

MEANING = (
    "The share of samples on which two members predict different classes, and how similar the inputs of their "
    "classifiers are (linear CKA): an ensemble gains if members are accurate and disagree. Neither says which "
    "member is right, and CKA does not see a difference that no classifier uses as such."
)
QUANTITIES = {"disagreement": "disagreement", "cka": "CKA"}
NAMED = 10  # members up to which their names are written


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look) -> tuple[Axes, ...]:
    """Draw the matrices of disagreement and of CKA of every two members."""
    names = [appearance.escaped(name) for name in differences.shortened([str(name) for name in data["name"].values])]
    for ax, (quantity, title) in zip(axes, QUANTITIES.items(), strict=False):
        values = data[quantity].values.copy()
        np.fill_diagonal(values, np.nan)
        image = ax.imshow(values, cmap="viridis")
        mean = float(data[f"mean_{quantity}"])
        ax.set_title(f"{title}, mean {mean:.3g}", fontsize=style.SMALL)
        ticks = range(len(names)) if len(names) <= NAMED else ()
        ax.set_xticks(ticks, [str(i + 1) for i in ticks], fontsize=style.SMALL)
        ax.set_yticks(ticks, [f"{names[i]}  {i + 1}" for i in ticks] if ax is axes[0] else [""] * len(ticks))
        ax.tick_params(axis="y", labelsize=style.SMALL)
        if ax.figure is not None:
            bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
            bar.ax.tick_params(labelsize=style.SMALL)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per ensemble."""
    figure = style.page(
        results, looks, height=(4.2 if narrow() else 2.4) * len(results), note="Numbers of members on both axes."
    )
    grid = figure.subplots(*((2 * len(results), 1) if narrow() else (len(results), 2)), squeeze=False).reshape(-1, 2)
    for data, look, axes in zip(results, looks, grid, strict=True):
        draw(data, tuple(axes), look=look)
        axes[0].set_ylabel(style.fitted(look.label, 2.2, style.RC["axes.labelsize"]))
    return figure

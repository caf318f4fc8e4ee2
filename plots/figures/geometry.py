"""Draw dimension, class separation and neural collapse of features over depth, all networks overlaid."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import broken, depth, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import rounding, stored

MEANING = (
    "How many dimensions the features of each layer fill, how well their classes are separated, and how far they have "
    "collapsed to the means of their classes: with complete collapse NC1, NC2 and NC4 are 0. Effective rank and TwoNN "
    "are too low where there are few images for the dimension, and means of few images per class come close to a "
    "simplex and to their images by themselves."
)
PANELS = {
    "effective_rank": "effective rank", "participation_ratio": "participation ratio",
    "intrinsic_dimension": "TwoNN dimension", "class_separation": "class separation", "nc1": "NC1\nwithin / between",
    "nc2_lengths": "NC2\nvariation of lengths", "nc2_simplex": "NC2\ndistance from simplex",
    "nc4": "NC4\nnot the nearest mean",
}  # fmt: skip
LOGARITHMIC = ("nc1",)
AT_HEAD = 1.15  # where the classifier's input stands, beyond the last layer
NOTE = f"Single markers on the right: the input of the classifier. {depth.ERRORS}"


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "effective_rank", look: Look, shade: bool = True) -> Axes:
    """Draw one quantity of every layer over normalised depth, and on the right that of the classifier's input."""
    if quantity in data and np.isfinite(data[quantity].values).any():
        depth.over_depth(data, ax, quantity, look=look, shade=shade)
    if f"head_{quantity}" in data:
        name = f"head_{quantity}"
        parts = (AT_HEAD, data[name], stored.error_of(data, name), stored.half_width(data, name))
        at, value, error, half = (np.array([float(number)]) for number in parts)
        ax.errorbar(at, value, yerr=broken.bar(half), color=look.color, marker=look.marker, linestyle="",
                    elinewidth=0.8, markersize=3.5)  # fmt: skip
        broken.mark(ax, at, value, error)
        ax.axvline((1 + AT_HEAD) / 2, color="0.5", linewidth=0.5, linestyle=":", zorder=0)
    ax.set(xlabel="normalised depth", xlim=(-0.07, AT_HEAD + 0.07), ylabel=PANELS[quantity])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per quantity with all networks; bands where there is one network."""
    shown = [name for name in PANELS if any(_known(data, name) for data in results)]
    one = len(results) == 1
    bands = f"{depth.NOTE.removesuffix(depth.ERRORS)}" if one else ""
    legend = looks if not one else []
    note = f"{bands}{NOTE}{_self_duality(results, looks)}"
    height = 1.4 if theme.narrow() else 1.75
    figure, axes = style.beside(results, looks, len(shown), height=height, legend=legend, note=note)
    for ax, quantity in zip(axes, shown, strict=True):
        for data, look in zip(results, looks, strict=True):
            draw(data, ax, quantity=quantity, look=look, shade=one)
        if quantity in LOGARITHMIC and all((data[quantity] > 0).any() for data in results if _known(data, quantity)):
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
    style.label_outer(axes, same=False)
    for ax in axes[: -2 if theme.narrow() else -4]:
        ax.set_xlabel("")
    return figure


def _known(data: xr.Dataset, quantity: str) -> bool:
    return quantity in data and bool(np.isfinite(data[quantity].values).any())


def _self_duality(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> str:
    """NC3 of every network that has one, in words."""
    known = [(look.label, float(data["head_nc3"]), float(stored.half_width(data, "head_nc3"))) for data, look in zip(
        results, looks, strict=True) if "head_nc3" in data and np.isfinite(data["head_nc3"].values)]  # fmt: skip
    parts = [f"{label} {rounding.plus_minus(value, half)}" for label, value, half in known]
    return f" NC3, classifier against class means: {', '.join(parts)}." if parts else ""

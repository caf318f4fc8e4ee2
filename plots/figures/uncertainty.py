"""Draw model and data uncertainty of feature maps over depth, and how far neighbours agree ("Blurs", 2022)."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots import depth, style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "How much a point of a feature map differs between the members of a stochastic network (model uncertainty) and "
    "from the other points of its map (data uncertainty), and how much the neighbours of the centre vary with it for "
    "random input: a smoothing block averages what neighbours disagree about. Uncertainties have the scale of the "
    "features, which a block changes too, and deep maps have few points."
)
LABELS = {
    "model_uncertainty": "model uncertainty",
    "data_uncertainty": "data uncertainty",
    "gaussian_neighbours": "covariance of neighbours",
}


def draw(data: xr.Dataset, ax: Axes, *, quantity: str = "data_uncertainty", look: Look, shade: bool = True) -> Axes:
    """Draw one quantity of every layer over normalised depth."""
    if quantity in data:
        depth.over_depth(data, ax, quantity, look=look, shade=shade)
    ax.set(ylabel=LABELS[quantity])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per quantity with all networks; bands where there is one network."""
    shown = [name for name in LABELS if any(name in data for data in results)]
    members = {int(data.attrs.get("members", 0)) for data in results if "model_uncertainty" in data}
    counted = f"Model uncertainty: over {', '.join(map(str, sorted(members)))} dropout masks. " if members else ""
    hollow = any((data["kind"].values == "smoothing").any() for data in results)
    several = f"{'Hollow: smoothing blocks. ' if hollow else ''}{depth.ERRORS}"
    note = f"{counted}{depth.NOTE if len(results) == 1 else several}"
    legend = looks if len(results) > 1 else []
    figure, axes = style.beside(results, looks, len(shown), height=2.0, legend=legend, note=note)
    for ax, quantity in zip(axes, shown, strict=True):
        for data, look in zip(results, looks, strict=True):
            draw(data, ax, quantity=quantity, look=look, shade=len(results) == 1)
    return figure

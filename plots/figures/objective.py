"""Draw the objective of a surface, loss + weight decay x l2, as a wire mesh (Park & Kim 2022, Fig. 1a)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import plane
from landscape.plots.figure import Figure, Look
from landscape.plots.figures import surface_3d

MEANING = (
    "Loss + weight decay x l2 on a plane, the height of the published figure, on one vertical scale for all panels. "
    "Much of what it shows is l2, which grows with any step away from small weights whatever the network has learnt: "
    "for the loss alone see the contours."
)


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw the rise of the objective over its least value, as `surface_3d` draws the loss."""
    return surface_3d.draw(rise(data), ax, span=span)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One mesh per result on a common vertical scale."""
    span = plane.bowl_range([rise(data) for data in results], surface_3d.SHARE)
    decays = sorted({f"{decay(data):g}" for data in results})
    least = ", ".join(f"{float(data['objective'].min()):.5g}" for data in results)
    note = (
        f"Vertical axis and colour: loss + {' or '.join(decays)} x l2 above its least value "
        f"({least}), up to {span[1]:.3g}; cells above are left out."
    )
    return plane.page_3d(results, looks, partial(draw, span=span), aspect=0.8, note=note)


def decay(data: xr.Dataset) -> float:
    """The coefficient of l2: stored with a measured surface, an attribute of an imported one."""
    return float(data["weight_decay"] if "weight_decay" in data else data.attrs.get("weight_decay", np.nan))


def rise(data: xr.Dataset) -> xr.Dataset:
    """The surface with the rise of the objective over its least value in place of the loss."""
    finite = data["objective"].where(np.isfinite(data["objective"]))
    return data.assign(loss=finite - finite.min())

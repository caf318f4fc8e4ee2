"""Draw a published surface, loss + weight decay x l2 of an imported CSV, as a wire mesh (Park & Kim 2022, Fig. 1a)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from landscape.plots import plane, surface_3d
from landscape.plots.appearance import Look

MEANING = (
    "Loss + weight decay x l2 on a plane, as published, on one vertical scale for all panels. Most of what it "
    "shows is l2, which grows with any step away from small weights whatever the network has learnt: for the loss "
    "alone see the contours."
)


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw the rise of the objective over its least value, as `surface_3d` draws the loss."""
    return surface_3d.draw(_rise(data), ax, span=span)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One mesh per result on a common vertical scale."""
    span = plane.vertical_range([_rise(data) for data in results], surface_3d.SHARE)
    decays = sorted({f"{float(data.attrs['weight_decay']):g}" for data in results if "weight_decay" in data.attrs})
    least = ", ".join(f"{float(data['objective'].min()):.5g}" for data in results)
    note = (
        f"Vertical axis and colour: loss + {' or '.join(decays) or 'weight decay'} x l2 above its least value "
        f"({least}), up to {span[1]:.3g}; cells above are left out."
    )
    return plane.page_3d(results, looks, partial(draw, span=span), aspect=0.8, note=note)


def _rise(data: xr.Dataset) -> xr.Dataset:
    return data.assign(loss=data["objective"] - data["objective"].min())

"""The published surface of an imported CSV: loss + weight decay x l2, as a wire mesh (Park & Kim 2022, Fig. 1a)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

from landscape.plots import style, surface_3d
from landscape.plots.appearance import Look

MEANING = (
    "Loss + weight decay x l2 on a plane, as it was published, on one vertical scale for all panels. Most of what it "
    "shows is l2, which grows with any step away from small weights whatever the network has learnt: for the loss "
    "alone see the contours."
)


def draw(data: xr.Dataset, ax: Any, *, span: tuple[float, float] | None = None) -> Any:
    """Draw the rise of the objective over its least value, as `surface_3d` draws the loss."""
    return surface_3d.draw(_rise(data), ax, span=span)


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One mesh per answer on a common vertical scale."""
    span = surface_3d.heights([_rise(data) for data in answers])
    decays = sorted({f"{float(data.attrs['weight_decay']):g}" for data in answers if "weight_decay" in data.attrs})
    least = ", ".join(f"{float(data['objective'].min()):.5g}" for data in answers)
    note = (
        f"Vertical axis and colour: loss + {' or '.join(decays) or 'weight decay'} x l2 above its least value "
        f"({least}), up to {span[1]:.3g}; cells above are left out."
    )
    figure, axes = style.panels(answers, looks, aspect=0.8, share=False, projection="3d", note=note)
    for data, ax in zip(answers, axes, strict=True):
        draw(data, ax, span=span)
    return figure


def _rise(data: xr.Dataset) -> xr.Dataset:
    return data.assign(loss=data["objective"] - data["objective"].min())

"""Draw the critical sharpness along the updates of a run, with the value above which an update raises the loss."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import monitor

MEANING = (
    "Critical sharpness (solid): 2 / eta_c, eta_c the smallest learning rate along the update that was made at which "
    "the loss of the mini-batch exceeds its start. Above the dashed line, 2 / learning rate, the update itself raised "
    "that loss, whatever the optimiser; it is no threshold of stability, single updates on mini-batches cross it, and "
    "there is no value where the loss rose at once."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the critical sharpness over the steps and 2 / learning rate."""
    return monitor.over_steps(_with_limit(data), ax, "critical_sharpness", "limit", "critical sharpness", look)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    runs = [_with_limit(data) for data in results]
    return monitor.overlaid(runs, looks, draw, "critical_sharpness", "limit", "2 / learning rate")


def _with_limit(data: xr.Dataset) -> xr.Dataset:
    return data.assign(limit=2 / data["learning_rate"])

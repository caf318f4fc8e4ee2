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
    return monitor.over_steps(_with_limit(data), ax, "critical", "limit", "known", "critical sharpness", look)


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    return monitor.overlaid(
        [_with_limit(data) for data in results], looks, draw, "critical", "limit", "2 / learning rate"
    )


def _with_limit(data: xr.Dataset) -> xr.Dataset:
    """The data with 2 / learning rate, and the critical sharpness as the only one of its rank."""
    one = data["critical_sharpness"].expand_dims("first", -1).rename(first="rank")
    kept = data[["critical_sharpness", "learning_rate", "alarm"]].assign_attrs(data.attrs)
    return kept.assign(critical=one, limit=2 / data["learning_rate"], known=one.notnull())

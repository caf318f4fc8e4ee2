"""Draw consistency and cross-entropy consistency per perturbation, all networks in each panel."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots import rows
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import ends_of

MEANING = (
    "How steady the predictions are along sequences of slowly changing images: the share of neighbouring frames with "
    "the same prediction, the cross-entropy between neighbouring frames, and the accuracy over all frames, with 95 % "
    "intervals over images. A network may be steadily wrong, and a confident one has a lower cross-entropy, so read "
    "the panels together."
)
LABELS = {"consistency": "consistency", "cross_entropy": "cross-entropy consistency (nats)", "accuracy": "accuracy"}
NOTE = "95 % intervals over images."


def draw(data: xr.Dataset, ax: Axes, score: str = "consistency", *, look: Look, shift: float = 0.0) -> Axes:
    """Draw a score of every perturbation, below each other."""
    value, ends = data[score].values, ends_of(data, score)
    rows.draw(ax, short_names(data), value, ends, look=look, shift=shift)
    ax.set_xlabel(LABELS[score])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score; networks with the same perturbations share a row."""
    return rows.page(results, looks, list(LABELS), draw, short_names, note=NOTE)[0]


def short_names(data: xr.Dataset) -> list[str]:
    """Names of the perturbations, for axes."""
    return rows.names(data, "perturbation_name")

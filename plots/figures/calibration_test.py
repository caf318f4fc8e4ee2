"""Draw accuracy against NLL of several networks on test data (Park & Kim 2022, arXiv 2105.12639)."""

from collections.abc import Sequence
from dataclasses import replace

import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import calibration_train
from landscape.results.protocols import stored

MEANING = (
    "Networks further to the left have a lower negative log likelihood, those further up a higher accuracy: a "
    "network to the right of others of equal accuracy is worse calibrated. Both axes are of the same samples, so that "
    "the two errors of a point are dependent."
)
LEAST = 2  # networks in the figure


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw one network as a point with its 95 % intervals."""
    calibration_train.point(data, data, ax, look, error=False)
    split = _split(data)
    ax.set(xlabel=f"NLL on {split} (nats)", ylabel=f"accuracy on {split}")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel with a point per network."""
    legend = [replace(look, line=" ") for look in looks]
    note = "Bars: 95 % intervals over samples."
    return style.overlaid(results, looks, draw, height=2.6, width=theme.panel_width(), legend=legend, note=note)[0]


def select(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of the results of samples that were not trained on, if they are of several networks."""
    found = [i for i, data in enumerate(results) if _split(data) == "test"]
    return found if len(found) >= LEAST else []


def _split(data: xr.Dataset) -> str:
    return str(stored(data, "spec").get("split", "")) or "test"

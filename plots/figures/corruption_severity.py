"""Draw accuracy, NLL and calibration error over the severity of corruptions, mean over corruptions."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.corruption import METRICS
from landscape.statistics.stored import ends_of

MEANING = (
    "Scores on the test images over the severity of corruptions, mean over all corruptions, with bands of 95 % over "
    "images; severity 0 is the clean images. The severities of different corruptions are not equally hard, and the "
    "mean hides which corruption a network fails at."
)
NOTE = "Mean over corruptions. Bands: 95 % intervals over images."


def draw(data: xr.Dataset, ax: Axes, *, look: Look, metric: str = "accuracy") -> Axes:
    """Draw a score over severity, from the clean images at 0, with its 95 % band."""
    shown = np.isfinite(data[f"severity_{metric}"].values)
    severity = data["severity"].values[shown]
    value = data[f"severity_{metric}"].values[shown]
    low, high = (end[shown] for end in ends_of(data, f"severity_{metric}"))
    ax.fill_between(severity, low, high, color=look.color, alpha=0.18, linewidth=0)
    clean = float(data.attrs.get(f"clean_{metric}", np.nan))
    start = ([0], [clean]) if np.isfinite(clean) else ([], [])
    x, y = np.r_[start[0], severity], np.r_[start[1], value]
    ax.plot(x, y, **look.cues, label=look.label)
    ax.set(xlabel="severity", ylabel=METRICS[metric])
    ax.set_xticks([0, *data["severity"].values])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, every network in each."""
    figure, axes = style.beside(results, looks, len(METRICS), height=2.0, legend=looks, note=NOTE)
    for ax, metric in zip(axes, METRICS, strict=True):
        for data, look in zip(results, looks, strict=True):
            draw(data, ax, look=look, metric=metric)
    style.label_outer(axes, same=False)
    return figure

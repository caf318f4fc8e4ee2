"""Draw the sharpness that a run's optimiser sees over its steps, with the threshold at which it becomes unstable."""

from collections.abc import Sequence

import xarray as xr

from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import monitor

MEANING = (
    "The largest eigenvalue of P^-1/2 H P^-1/2, P the optimiser's preconditioner (solid), and the largest one that it "
    "can bear (dashed; (2 + 2 beta1) / ((1 - beta1) learning rate) for Adam): full-batch training equilibrates near "
    "the dashed line. P follows the gradients, so that a high value may come from small gradients as well as from "
    "high curvature."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the largest preconditioned eigenvalue over the steps and its threshold."""
    names = ("preconditioned", "preconditioned_threshold", "largest preconditioned eigenvalue")
    return monitor.over_steps(data, ax, *names, look, converged="preconditioned_converged")


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    return monitor.overlaid(results, looks, draw, "preconditioned", "preconditioned_threshold")

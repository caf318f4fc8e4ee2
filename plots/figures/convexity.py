"""Draw |lambda_min| / |lambda_max| of the Hessian over a plane through the weights (Li et al. 2018, Fig. 7)."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import xarray as xr

from landscape.plots import plane, style
from landscape.plots.figure import Axes, Figure, Look, Normalize

MEANING = (
    "How strong negative curvature is beside positive at every point of a plane, over all directions of weight space "
    "and not only those of the plane: near 0 the loss is almost convex there, at 1 as concave as convex. The extreme "
    "eigenvalues say nothing about how many directions are negative, and a ratio may rise because the largest falls."
)
RATIOS = (1e-3, 1e3)  # beyond them colours do not change


def draw(data: xr.Dataset, ax: Axes, *, norm: Normalize | None = None) -> Axes:
    """Draw one cell per grid point; a cross marks an eigenvalue that did not converge, grey is unfinished."""
    plane.draw_cells(ax, data, "ratio", norm or _norm([data]))
    x, y = data["x"].values, data["y"].values
    rows, columns = np.nonzero(data["converged"].transpose("y", "x").values == 0)
    ax.plot(x[columns], y[rows], "x", color="w", markersize=2.5, markeredgewidth=0.6, linestyle="")
    plane.mark_checkpoints(data, ax)
    plane.label_axes(data, ax, xlim=ax.get_xlim(), ylim=ax.get_ylim())
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result and one colour bar."""
    norm = _norm(results)
    open_ends = any((data["converged"].values == 0).any() for data in results)
    note = "Crosses: an eigenvalue did not converge; its residual is stored." if open_ends else ""
    figure, axes = plane.page_of_maps(results, looks, partial(draw, norm=norm), note)
    style.colour_bar(figure, axes, norm, plane.COLORS, "|λ min| / |λ max|")
    return figure


def notes(data: xr.Dataset) -> dict[str, str]:
    """How many points are not converged."""
    unconverged = int((data["converged"].values == 0).sum())
    return {"not converged": str(unconverged)} if unconverged else {}


def _norm(results: Sequence[xr.Dataset]) -> Normalize:
    """Logarithmic colours over the ratios of all results, within `RATIOS`."""
    from matplotlib.colors import LogNorm

    values = np.concatenate([data["ratio"].values.ravel() for data in results])
    values = np.clip(values[np.isfinite(values)], *RATIOS)
    low, high = (float(values.min()), float(values.max())) if values.size else RATIOS
    return LogNorm(low, high if high > low else 2 * low, clip=True)

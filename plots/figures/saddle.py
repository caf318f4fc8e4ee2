"""Draw the loss on the plane of the two extreme Hessian eigenvectors together with its quadratic model."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.appearance import escaped, loss_label
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.surface import contour_levels
from landscape.plots.figures.surface import draw as draw_contours
from landscape.plots.plane import axis_label
from landscape.statistics.stored import half_width

MEANING = (
    "The loss along the eigenvectors of the smallest and the largest Hessian eigenvalue, and (dashed) the quadratic "
    "given by its value, slope and curvature at the checkpoint. Where they differ, curvature at the checkpoint no "
    "longer describes the valley; the plane shows the two extreme directions and none of the flat ones."
)
FACTS = ("model_loss", "slope_x", "slope_y", "curvature_x", "curvature_y")
FINE = 201  # points of the quadratic model, which is known everywhere
X, Y = "#D55E00", "#0072B2"


def draw(data: xr.Dataset, axes: tuple[Axes, Axes]) -> tuple[Axes, Axes]:
    """Draw the loss with the model's contours, dashed (first axes), and both along lines through the checkpoint."""
    plane, lines = axes
    x, y = data["x"].values, data["y"].values
    levels = contour_levels([data])
    draw_contours(data, plane, levels=levels)
    along_x, along_y = (np.linspace(at.min(), at.max(), FINE) for at in (x, y))
    fitted = model(data, along_x[None, :], along_y[:, None])
    within = levels[(levels > fitted.min()) & (levels < fitted.max())]
    if within.size:
        plane.contour(along_x, along_y, fitted, levels=within, colors="w", linewidths=0.7, linestyles="--")
    loss, halves = data["loss"].transpose("x", "y").values, half_width(data.transpose("x", "y", ...), "rise")
    i, j = int(np.abs(x).argmin()), int(np.abs(y).argmin())
    for at, values, half, fine, fit, color in (
        (x, loss[:, j], halves[:, j], along_x, model(data, along_x, np.array(0.0)), X),
        (y, loss[i], halves[i], along_y, model(data, np.array(0.0), along_y), Y),
    ):
        lines.plot(at, values, color=color)
        lines.fill_between(at, values - half, values + half, color=color, alpha=0.2, linewidth=0)
        lines.plot(fine, fit, "--", color=color, linewidth=0.8)
    drawn, half = np.concatenate([loss[:, j], loss[i]]), np.concatenate([halves[:, j], halves[i]])
    seen = np.concatenate([drawn, drawn - half, drawn + half])
    seen = seen[np.isfinite(seen)]
    if seen.size:
        margin = 0.1 * max(float(np.ptp(seen)), 1e-9)
        lines.set_ylim(seen.min() - margin, seen.max() + margin)
    for ax in axes:
        ax.locator_params(axis="x", nbins=5)  # small ranges have long labels
    lines.set(xlabel="distance along the eigenvector (weight)", ylabel=loss_label([data]))
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per result: the plane, and the lines through its centre."""
    legend = [
        Look("along x: smallest eigenvalue", X, ""),
        Look("along y: largest eigenvalue", Y, ""),
        Look("quadratic model", theme.muted(), "", "--"),
    ]
    note = "Band: 95 % interval of the rise over the checkpoint's loss, paired over samples."
    figure = style.page(results, looks, height=2.9 * len(results), legend=legend, note=note)
    rows = figure.subplots(len(results), 2, squeeze=False)
    for data, look, axes in zip(results, looks, rows, strict=True):
        draw(data, tuple(axes))
        curvatures = escaped(f"curvature {data.attrs['curvature_x']:.3g} and {data.attrs['curvature_y']:.3g}")
        axes[0].set_title(style.fitted(look.label, theme.page_width() / 2, style.SMALL), fontsize=style.SMALL)
        axes[1].set_title(curvatures, fontsize=style.SMALL)
        for set_label, axis in ((axes[0].set_xlabel, "x"), (axes[0].set_ylabel, "y")):
            set_label(style.fitted(axis_label(data, axis), 2.4, style.SMALL), fontsize=style.SMALL)
    return figure


def select(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of the results on a plane of eigenvectors, which know their quadratic model."""
    return [i for i, data in enumerate(results) if all(name in data.attrs for name in FACTS)]


def model(data: xr.Dataset, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The quadratic model of the loss at coordinates of the plane."""
    value, slope_x, slope_y, curvature_x, curvature_y = (float(data.attrs[name]) for name in FACTS)
    return np.asarray(value + slope_x * x + slope_y * y + 0.5 * curvature_x * x**2 + 0.5 * curvature_y * y**2)

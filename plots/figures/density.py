"""Draw the spectral density of the Hessian on axes that show the bulk (compare Ghorbani et al. 2019, Fig. 1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xarray as xr

from landscape.plots import headlines, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import intervals, rounding, stored

MEANING = (
    "The density of all Hessian eigenvalues: the mean over random start vectors, with its 95 % interval "
    "as a band. One eigenvalue cannot be told apart from a few, values closer than the broadening merge into one peak, "
    "and where the band is wide, more vectors are needed."
)
POINTS = 800


@dataclass(frozen=True)
class AxisResolution:
    """The scale of the eigenvalue axis and the broadening of the nodes on it."""

    linear: float  # the axis is asinh(eigenvalue / linear): linear up to this value, logarithmic beyond
    width: float  # standard deviation of the Gaussian that broadens a node, on that axis

    def note(self) -> str:
        """For the caption of a figure."""
        return f"Axis linear within ±{self.linear:.2g}; nodes broadened by {self.width:.2g} on it."


def draw(data: xr.Dataset, ax: Axes, *, look: Look, resolution: AxisResolution | None = None) -> Axes:
    """Draw the mean density of eigenvalues with its 95 % interval over runs, both axes logarithmic away from zero.

    By default the resolution comes from the distances between the nodes.
    """
    resolution = resolution or axis_resolution_of([data])
    at, curves = broadened(*quadratures(data), resolution)
    mean, runs = curves.mean(axis=0), len(curves)
    ax.plot(at, mean, color=look.color, linestyle=look.line, label=look.label)
    if runs >= intervals.FEWEST:
        low, high = intervals.positive_interval(mean, curves.std(axis=0, ddof=1) / np.sqrt(runs), runs)
        ax.fill_between(at, low, high, color=look.color, alpha=0.2, linewidth=0)
    style.asinh(ax, "x", resolution.linear)
    ax.set(xlabel="Hessian eigenvalue", ylabel="density", yscale="log")
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
    ax.set_ylim(0.3 * float(np.quantile(heights, 0.12)), 3 * float(heights.max()))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All results overlaid with one broadening, mean and ends in the legend."""
    resolution = axis_resolution_of(results)
    named = (f"{look.label}: {_numbers(data)}" for data, look in zip(results, looks, strict=True))
    legend = [replace(look, label=label, marker="") for label, look in zip(named, looks, strict=True)]
    note = f"{resolution.note()} Band: 95 % interval over start vectors."
    return style.overlaid(results, looks, partial(draw, resolution=resolution), height=2.4, legend=legend, note=note)[0]


def quadratures(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the finished runs, (run, node), padded with NaN where a run ended early."""
    nodes, weights = (data.variables[name].transpose(..., "node").values for name in ("nodes", "weights"))
    nodes = np.where(np.isfinite(nodes) & np.isfinite(weights), nodes, np.nan)
    known = np.isfinite(nodes).any(axis=1)
    return nodes[known], weights[known]


def axis_resolution_of(results: Sequence[xr.Dataset]) -> AxisResolution:
    """Linear within the median distance of neighbouring nodes, broadened by their median distance on that axis.

    A share of the largest eigenvalue would hide the bulk, which is narrower by orders of magnitude.
    """
    nodes = [row for data in results for row in quadratures(data)[0]]
    linear = _median_distance(nodes) or max(float(np.nanmax(np.abs(row))) for row in nodes) or 1.0
    return AxisResolution(linear, _median_distance([np.arcsinh(row / linear) for row in nodes]) or 0.1)


def broadened(nodes: np.ndarray, weights: np.ndarray, resolution: AxisResolution) -> tuple[np.ndarray, np.ndarray]:
    """Points, and the density at them for every start vector, (points,), (vector, points).

    Every node becomes a Gaussian on the axis u = asinh(x / linear); du/dx makes it a density over x with integral 1.
    """
    u = np.arcsinh(nodes / resolution.linear)
    margin = 5 * resolution.width
    at = np.linspace(np.nanmin(u) - margin, np.nanmax(u) + margin, POINTS)
    z = (at - u[:, :, None]) / resolution.width  # (vector, node, points)
    bumps = weights[:, :, None] * np.exp(-0.5 * z**2) / (resolution.width * np.sqrt(2 * np.pi))
    x = resolution.linear * np.sinh(at)
    return x, np.nansum(bumps, axis=1) / np.hypot(x, resolution.linear)


def _median_distance(rows: Sequence[np.ndarray]) -> float:
    distances = np.concatenate([np.diff(np.sort(row[np.isfinite(row)])) for row in rows])
    return float(np.median(distances)) if distances.size else 0.0


def _numbers(data: xr.Dataset) -> str:
    mean, low, high = (float(data[name]) for name in ("mean", "smallest", "largest"))
    return f"mean {rounding.plus_minus(mean, float(stored.half_width(data, 'mean')))}, from {low:.3g} to {high:.3g}"


def notes(data: xr.Dataset) -> dict[str, str]:
    """What the heterogeneity of blocks is, and that `tol` is not met."""
    definition = str(data.attrs.get("heterogeneity_definition", ""))
    return headlines.missed_tol(data) | ({"heterogeneity is the": definition} if "heterogeneity" in data else {})

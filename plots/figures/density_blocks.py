"""Draw the spectra of the Hessian's diagonal blocks and how far they are apart (Zhang et al., arXiv 2402.16788)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import rounding, stored
from landscape.statistics.block_spectra import densities

MEANING = (
    "Left, the spectral density of every diagonal block of the Hessian, in the order of the network; right, the "
    "Jensen-Shannon distance of every two, 0 where the spectra are equal and 1 where they do not overlap. A block "
    "leaves out interactions with other blocks, and what is finer than the broadening near zero is not told apart."
)
MAP = "viridis"
FAINT = 1e-5  # probability per bin below which a row is empty
LABELS = 40  # rows that are named
ROW = 0.095  # inches


def draw(data: xr.Dataset, axes: tuple[Axes, Axes]) -> tuple[Axes, Axes]:
    """Draw the density of every block as a row, and the matrix of distances."""
    spectra, matrix = axes
    nodes, weights = (data[name].transpose("vector", "block", "node").values for name in ("nodes", "weights"))
    finished = np.isfinite(nodes[:, :, 0]).any(axis=1)
    known = np.isfinite(nodes[finished][:, :, 0]).all(axis=0)
    edges, probability, linear = densities(nodes[finished][:, known], weights[finished][:, known], own_scale=False)
    whole = np.full((len(known), probability.shape[1]), np.nan)
    whole[known] = np.where(probability > FAINT, np.log10(np.maximum(probability, FAINT)), np.nan)
    style_map: dict[str, Any] = {"cmap": MAP, "rasterized": True}
    spectra.pcolormesh(linear * np.sinh(edges), np.arange(len(known) + 1) - 0.5, whole, vmin=np.log10(FAINT), vmax=0,
                       **style_map)  # fmt: skip
    style.asinh(spectra, "x", linear)
    seen = edges[:-1][np.isfinite(whole).any(axis=0)]
    spectra.set_xlim(*(linear * np.sinh(np.array([seen.min() - 0.2, seen.max() + 0.3]))))
    spectra.axvline(0, color="0.5", linewidth=0.4)
    matrix.imshow(data["js_distance"].values, vmin=0, vmax=1, interpolation="nearest", aspect="auto", cmap="magma")
    names = [appearance.escaped(str(name)) for name in data["name"].values]
    step = -(-len(names) // LABELS)
    spectra.set_yticks(range(0, len(names), step), names[::step], fontsize=style.SMALL - 1)
    matrix.set_yticks([])
    matrix.set_xticks([])
    spectra.set(xlabel="eigenvalue of the block", ylim=(len(names) - 0.5, -0.5))
    matrix.set(xlabel="block")
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row of two panels per result: spectra with their heterogeneity above, and distances."""
    heights = [0.75 + max(1.3, ROW * min(data.sizes["block"], LABELS)) for data in results]
    note = "Heterogeneity: the mean distance over all pairs of blocks."
    figure = style.page(results, looks, height=sum(heights), note=note)
    rows = figure.subplots(
        len(results), 2, squeeze=False, gridspec_kw={"height_ratios": heights, "width_ratios": (3, 2)}
    )
    for data, look, axes in zip(results, looks, rows, strict=True):
        draw(data, tuple(axes))
        axes[0].set_title(style.fitted(look.label, 0.5 * theme.page_width(), style.SMALL + 1), fontsize=style.SMALL + 1)
        axes[1].set_title(f"heterogeneity {_number(data)}", fontsize=style.SMALL + 1)
    bars = (("probability per bin (log10)", MAP, (np.log10(FAINT), 0)), ("Jensen-Shannon distance", "magma", (0, 1)))
    for column, (label, colours, ends) in enumerate(bars):
        style.colour_bar(figure, rows[:, column], ends, colours, label, location="bottom")
    return figure


def _number(data: xr.Dataset) -> str:
    return rounding.plus_minus(float(data["heterogeneity"]), float(stored.half_width(data, "heterogeneity")))

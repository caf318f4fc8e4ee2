"""Draw how much of the Hessian lies between its diagonal blocks, and how much beyond Gauss-Newton, block by block."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, broken, rows, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import half_width

MEANING = (
    "For random vectors v and the rows of every block: dark, |(H - H_bd) v| / |H v|, what a block-diagonal Hessian "
    "leaves out; light, |N v| / |H v|, what the Gauss-Newton approximation leaves out; lines are those of all rows, "
    "error bars 95 % intervals over mini-batches. They are shares of the whole matrix, of the mini-batches' size, and "
    "say nothing about a particular direction."
)
ROW = 0.15  # inches per block
BARS = (("off_block", 1.0, "-", "between the blocks"), ("non_gauss_newton", 0.45, "--", "beyond Gauss-Newton"))


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw two bars for every block, the first block on top, and the values of all rows as lines."""
    at = np.arange(data.sizes["block"])
    for i, (name, alpha, line, label) in enumerate(BARS):
        error = broken.bar(half_width(data, f"rows_{name}"))
        ax.barh(at + 0.4 * i - 0.2, data[f"rows_{name}"].values, xerr=error, height=0.38, color=look.color,
                alpha=alpha, label=label, error_kw={"elinewidth": 0.6, "ecolor": "0.25"})  # fmt: skip
        ax.axvline(float(data[name]), color=theme.muted(), linewidth=0.8, linestyle=line)
    ax.set_yticks(at, [appearance.escaped(str(name)) for name in data["name"].values], fontsize=style.SMALL)
    ax.set(ylim=(len(at) - 0.4, -0.6), xlabel="share of |H v|")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per result, as high as the longest list of blocks needs."""
    note = "Dark bars, solid line: between the blocks; light bars, dashed line: beyond Gauss-Newton."
    return rows.panel_each(results, looks, draw, "block", ROW, note=note)

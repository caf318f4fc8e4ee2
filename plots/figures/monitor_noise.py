"""Draw the gradient noise scale of a run over its steps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.stored import half_width

MEANING = (
    "The simple noise scale tr Sigma / |G|^2 in samples, the batch size at which gradient and noise are of equal "
    "size: a dot per measurement, and as a line the ratio of tr Sigma and |G|^2 averaged over nine neighbouring "
    "measurements. It predicts a useful batch size only where the Hessian is near a multiple of the identity, and a "
    "dot from few parts of one mini-batch is wrong by a factor of two or more."
)
WINDOW = 9  # measurements


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the noise scale of every measurement, with its 95 % interval, and the ratio of both averages as a line."""
    step, scale = data["step"].values, data["noise_scale"].values
    known = np.isfinite(scale) & (scale > 0)
    half = broken.bar(half_width(data, "noise_scale")[known])
    bars = np.stack([np.minimum(half, 0.9 * scale[known]), half])  # a logarithmic axis has no place for zero
    broken.mark(ax, step, np.where(scale > 0, scale, np.nan), data["noise_scale_se"].values)
    ax.errorbar(
        step[known], scale[known], bars, color=look.color, marker=look.marker, linestyle="none", markersize=1.8,
        elinewidth=0.4, alpha=0.45,
    )  # fmt: skip
    smooth = averaged(data)
    shown = np.isfinite(smooth) & (smooth > 0)
    ax.plot(step[shown], smooth[shown], color=look.color, linestyle=look.line, linewidth=1.1, label=look.label)
    ax.update_datalim(np.stack([step, np.ones(len(step))], axis=1), updatey=False)  # steps without a number too
    style.whole_numbers(ax)
    ax.set(xlabel="step", ylabel="noise scale (samples)", yscale="log")
    return ax


def averaged(data: xr.Dataset) -> np.ndarray:
    """The ratio of tr Sigma and |G|^2, each averaged over neighbouring rows that have both, (step,); else NaN."""
    both = data[["gradient_variance", "gradient_squared"]]
    known = np.isfinite(both.to_array().values).all(axis=0)
    means = both.isel(step=known).rolling(step=WINDOW, center=True, min_periods=WINDOW // 2 + 1).mean()
    ratio = np.full(len(known), np.nan)
    ratio[known] = means["gradient_variance"] / means["gradient_squared"]
    return ratio


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """All runs overlaid."""
    note = (
        "Dots: single measurements with 95 % intervals, none where |G|^2 is not above 0; lines: averages of tr Sigma "
        f"and |G|^2 over {WINDOW // 2 + 1} to {WINDOW}."
    )
    legend = [replace(look, marker="") for look in looks]
    return style.overlaid(results, looks, draw, height=2.5, legend=legend, note=note)[0]

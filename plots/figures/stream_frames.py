"""Draw the probability of the true class frame by frame, with and without temporal smoothing."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures.stream import window
from landscape.results.reader import parameters_of

MEANING = (
    "The probability of the true class in every frame: a single pass flickers where the network is unsure, and the "
    "average over frames does not. One stream is one sample of scenes, so that single excursions mean little."
)
MOST = 200  # frames in a strip


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw exp(-NLL) of the first frames: thin grey without smoothing, coloured at the tau of lowest NLL.

    Ticks below mark frames that are wrong, or less than half right; the lower row is that without smoothing.
    """
    length = int(parameters_of(data).get("clip_length", 0))
    for start in range(length, min(MOST, data.sizes["frame"]), length) if length else ():
        ax.axvline(start - 0.5, color=theme.missing(), linewidth=0.6)
    frames = data.isel(frame=slice(MOST))
    x = frames["frame"].values
    for row, (i, color, width) in enumerate(((0, "0.55", 0.7), (int(data["best"]), look.color, 1.2))):
        p = np.exp(-frames["frame_nll"].isel(method=i).values)
        for clip in range(int(x[-1]) // length + 1 if len(x) and length else 1):  # lines pass frames without a label
            there = np.isfinite(p) & ((x // length == clip) if length else True)
            marker = "." if there.sum() == 1 else ""
            ax.plot(x[there], p[there], color=color, linewidth=width, marker=marker)
        wrong = x[frames["frame_accuracy"].isel(method=i).values < 0.5]
        ax.plot(wrong, np.full(len(wrong), -0.12 + 0.06 * row), "|", color=color, markersize=4, markeredgewidth=0.8)
    ax.set(
        xlabel="frame", ylabel="p of the true class", ylim=(-0.18, 1.02), xlim=(x[0] - 1, x[-1] + 1) if len(x) else None
    )
    ax.set_yticks([0, 0.5, 1])
    style.whole_numbers(ax)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One strip per network."""
    from matplotlib.lines import Line2D

    legend = [Line2D([], [], color="0.55", linewidth=0.7, label="one pass, no smoothing")]
    for data, look in zip(results, looks, strict=True):
        label = f"{look.label}, tau {float(data['tau'][int(data['best'])]):g}"
        legend.append(Line2D([], [], color=look.color, label=label))
    note = (
        "Of masks the geometric mean over pixels. Ticks: wrong frames (of masks: below one half); grey lines: ends of "
        f"clips. {window(results[0])}"
    )
    figure = style.page(results, looks, height=1.35 * len(results) + 0.2, legend=legend, note=note)
    axes = figure.subplots(len(results), 1, squeeze=False, sharex=True)[:, 0]
    for ax, data, look in zip(axes, results, looks, strict=True):
        draw(data, ax, look=look)
        ax.label_outer()
    return figure

"""Draw reliability diagrams with histograms of confidence, and paired differences of networks (Guo et al. 2017)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import differences, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.reader import parameters_of
from landscape.statistics import calibration as statistics
from landscape.statistics import intervals, stored
from landscape.statistics.paired import Difference, by_error, comparable, mcnemar, paired_t
from landscape.statistics.rounding import plus_minus

MEANING = (
    "How often a prediction of some confidence is right: below the diagonal the network is overconfident, above it "
    "underconfident, and the histogram shows how many samples each point stands for. Calibration is that of the "
    "data it was measured on, and a network that always predicts the class frequencies is calibrated without being "
    "of any use."
)
NOTE = "Bars: 95 % intervals (Wilson, of the accuracy per bin)."
COMPARED = {"nll": "NLL (nats)", "accuracy": "accuracy", "brier": "Brier score", "ece": "ECE"}
COLUMNS = 3  # networks side by side
HIGH = 1.6  # height of a diagram with its histogram, in widths


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look) -> tuple[Axes, ...]:
    """Draw the accuracy over the confidence (first axes), and the share of samples per bin (second, if any).

    Pale is the half that the temperature was not fitted on, after temperature scaling.
    """
    ax = axes[0]
    ax.plot([0, 1], [0, 1], color=theme.muted(), linewidth=0.7, linestyle="--", zorder=0)
    for prefix, alpha, face in (("scaled_", 0.6, theme.ground()), ("", 1.0, look.color)):
        confidence, accuracy, low, high = diagram(data, prefix)
        ax.errorbar(
            confidence, accuracy, yerr=np.stack([accuracy - low, high - accuracy]), color=look.color, alpha=alpha,
            marker=look.marker, markerfacecolor=face, linestyle=":" if prefix else look.line, elinewidth=0.7,
            zorder=2 if prefix else 3,
        )  # fmt: skip
        if len(axes) > 1:
            count = data[f"{prefix}bin_count"].values
            middle, width = data["bin"].values, 1 / len(count)
            share = count / max(count.sum(), 1)
            how = {"fill": False, "linestyle": ":"} if prefix else {"alpha": 0.35}
            axes[1].bar(middle, share, width=width, color=look.color, edgecolor=look.color, linewidth=0.8, **how)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    behind = {"facecolor": theme.ground(), "alpha": 0.8, "linewidth": 0, "pad": 1.5}
    timid = float(data["ece_signed"]) < 0  # points above the diagonal leave the corner below it free
    at: Any = {"x": 0.98, "y": 0.03, "ha": "right", "va": "bottom"} if timid else {"x": 0.03, "y": 0.98, "va": "top"}
    ax.text(**at, s=words(data), transform=ax.transAxes, fontsize=style.SMALL, bbox=behind, zorder=4)
    for histogram in axes[1:]:
        histogram.set(xlabel="confidence", ylabel="share", xlim=(0, 1))
        histogram.locator_params(axis="y", nbins=2)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Diagram above histogram, one column per network; below, networks on the same samples against the first one."""
    compared = comparable(results)
    columns = 2 if theme.narrow() else min(COLUMNS, max(2, len(results)))
    rows = -(-len(results) // columns)
    side = theme.page_width() / columns
    below = differences.height(len(compared))
    note = f"{NOTE} Open markers, dotted: after temperature scaling, on the half of the samples it was not fitted on."
    if compared:
        resamples = ", ".join(sorted({str(parameters_of(results[i]).get("draws", 1000)) for i in compared}))
        note += f" {differences.note(looks[compared[0]].label, how=f'of the ECE by {resamples} resamples')}"
    figure = style.page(results, looks, height=HIGH * side * rows + (below or 0.3), note=note)
    above: Any = figure
    if compared:
        parts: Any = figure.subfigures(2, 1, height_ratios=[HIGH * side * rows, below])
        above, under = parts
    grid = above.subplots(2 * rows, columns, height_ratios=[1, HIGH - 1.05] * rows, sharex=True, squeeze=False)
    highest = 0.0
    for k in range(rows * columns):
        axes = tuple(grid[2 * (k // columns) + j, k % columns] for j in (0, 1))
        if k >= len(results):
            for ax in axes:
                ax.remove()
            continue
        draw(results[k], axes, look=looks[k])
        size = style.title_size(columns)
        axes[0].set_title(style.fitted(looks[k].label, side, size), fontsize=size)
        axes[0].set_xlabel("")
        for ax in axes if k % columns else ():
            ax.set_ylabel("")
        highest = max(highest, axes[1].get_ylim()[1])
    for k in range(len(results)):
        grid[2 * (k // columns) + 1, k % columns].set_ylim(0, highest)
        grid[2 * (k // columns) + 1, k % columns].tick_params(labelbottom=True)
    if compared:
        first, *others = compared
        differences.draw(
            differences.axes_in(under, len(COMPARED)),
            COMPARED,
            [paired(results[i], results[first]) for i in others],
            [looks[i] for i in others],
        )
    return figure


def diagram(data: xr.Dataset, prefix: str = "") -> tuple[np.ndarray, ...]:
    """Mean confidence of the bins that hold samples, their accuracy, and the ends of its Wilson interval."""
    count = data[f"{prefix}bin_count"].values
    shown = count > 0
    n, confidence, p = (data[f"{prefix}bin_{name}"].values[shown] for name in ("count", "confidence", "accuracy"))
    return confidence, p, *intervals.share_interval(p, np.nan, n)


def words(data: xr.Dataset) -> str:
    """Calibration error with its interval, before and after scaling on the held-out half, and the temperature."""
    ece, low, high, held, scaled = (
        100 * float(data[name]) for name in ("ece", "ece_low", "ece_high", "held_ece", "scaled_ece")
    )
    lines = [f"ECE {ece:.1f} % [{low:.1f}, {high:.1f}]"]
    if np.isfinite(scaled):
        lines.append(f"scaled {held:.1f} → {scaled:.1f} %")
    if np.isfinite(float(data["temperature"])):
        lines.append(f"T = {plus_minus(float(data['temperature']), float(stored.half_width(data, 'temperature')))}")
    return "\n".join(lines)


def notes(data: xr.Dataset) -> dict[str, str]:
    """Calibration error and NLL of the samples that the temperature is not fitted on, before and after scaling."""
    found: dict[str, str] = {}
    for name in ("ece", "nll"):
        before, after = (float(data.get(f"{half}_{name}", np.nan)) for half in ("held", "scaled"))
        found |= {f"held-out {name}": f"{before:.4g} scaled {after:.4g}"} if np.isfinite(after) else {}
    return found


alike = comparable


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Means over samples by Student's t, shares by McNemar's test, and the calibration error by bootstrap."""
    mine, theirs = (statistics.stored_scores(one.variables) for one in (data, other))
    if len(mine) != len(theirs):
        return {}
    draws = int(parameters_of(data).get("draws", 1000))
    ece, interval = statistics.paired_difference(mine, theirs, draws=draws)["ece"]
    resampled = f"paired bootstrap of {draws} resamples"
    return {
        "nll": paired_t(mine.nll, theirs.nll),
        "accuracy": mcnemar(mine.correct, theirs.correct),
        "brier": paired_t(mine.brier, theirs.brier),
        "ece": by_error(ece, interval.error, len(mine), resampled, (interval.low, interval.high)),
        "signed ece": paired_t(mine.confidence - mine.correct, theirs.confidence - theirs.correct),
    }

"""Draw paired differences of networks on the same samples: a row per network, a panel per score."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from landscape.plots import appearance, broken, style, theme
from landscape.plots.figure import Axes, Look
from landscape.statistics.paired import Difference

LONGEST = 24  # characters of the label of a row; in one column of a paper two thirds
ROUNDING = 1e-12  # differences below it are zero: scores are of order 1


def height(count: int) -> float:
    """Inches for the differences of so many networks from the first of them; 0 for none."""
    rows = 2 if theme.narrow() else 1
    return rows * (0.85 + 0.17 * (count - 1)) if count > 1 else 0.0


def axes_in(figure: Any, scores: int) -> Sequence[Axes]:
    """Axes for the scores side by side, in two rows of narrow figures."""
    rows = 2 if theme.narrow() else 1
    return style.grid(figure, scores, -(-scores // rows), sharey=True)


def note(reference: str, *, how: str = "") -> str:
    """What the rows show, for the caption."""
    return f"Below: paired differences from {reference} on the same samples, 95 % intervals{how and f' ({how})'}."


def draw(
    axes: Sequence[Axes], labels: Mapping[str, str], found: Sequence[Mapping[str, Difference]], looks: Sequence[Look]
) -> None:
    """Draw a row per network, with its differences in each of the scores that `labels` names for the axes."""
    for row, (differences, look) in enumerate(zip(found, looks, strict=True)):
        for ax, name in zip(axes, labels, strict=True):
            one = differences[name]
            if np.isfinite(one.value):
                ends = broken.bars(one.value, one.low, one.high)
                ax.errorbar([one.value], [row], xerr=ends, color=look.color, marker=look.marker)
    for ax, label in zip(axes, labels.values(), strict=True):
        ax.axvline(0.0, color="0.5", linewidth=0.6, zorder=0)
        ax.set_xlabel(f"difference in {label}", fontsize=style.SMALL)
        ax.locator_params(axis="x", nbins=4)
        ax.tick_params(labelsize=style.SMALL)
        ax.margins(x=0.15)
        if np.abs(ax.dataLim.intervalx).max() < ROUNDING:  # a scale of its own would show rounding
            ax.set_xlim(-1.0, 1.0)
            ax.set_xticks([0.0])
        ax.set_ylim(len(found) - 0.5, -0.5)
    axes[0].set_yticks(range(len(found)), shortened([look.label for look in looks]))


def shortened(labels: Sequence[str]) -> list[str]:
    """Labels of rows, cut if long."""
    return appearance.cut(labels, [LONGEST * 2 // 3 if theme.narrow() else LONGEST] * len(labels))

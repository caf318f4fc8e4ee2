"""Draw numbers of a study's networks over arguments that they were trained with: a curve over one, a map over two."""

from collections.abc import Sequence

import numpy as np

from landscape.plots import appearance, broken, style, theme
from landscape.plots.figure import Axes, Figure
from landscape.statistics.intervals import FEWEST
from landscape.statistics.rounding import plus_minus
from landscape.studies.correlations import Diagram

COLUMNS = 2  # panels side by side
MAP = "viridis"
NOTE = f"Means over seeds; after ±, or as error bars: half the 95 % interval by Student's t, from {FEWEST} seeds on."


def page(found: Sequence[Diagram]) -> Figure:
    """A panel per diagram."""
    figure, axes = style.beside([], [], len(found), height=2.6, columns=min(COLUMNS, len(found)), note=NOTE)
    for ax, one in zip(axes, found, strict=True):
        (draw_map if len(one.over) > 1 else draw_curve)(one, ax)
        ax.set_title(appearance.escaped(f"{one.number} of {one.of}"), fontsize=style.SMALL)
        ax.set_xlabel(appearance.escaped(one.over[0]))
        ax.set_xticks(range(len(one.values(0))), [appearance.escaped(value) for value in one.values(0)])
    return figure


def draw_curve(found: Diagram, ax: Axes) -> Axes:
    """Draw the number over one argument with error bars."""
    color, marker = appearance.OTHERS[0]
    for place, cell in enumerate(found.row()):
        ax.errorbar([place], [cell[0]], yerr=broken.bars(*cell), color=color, marker=marker, elinewidth=0.8)
    ax.plot([mean for mean, *_ in found.row()], color=color)
    ax.set_ylabel(appearance.escaped(found.number))
    return ax


def draw_map(found: Diagram, ax: Axes) -> Axes:
    """Draw the number in the colour of a cell, and in words with its error."""
    cells = [found.row(second) for second in found.values(1)]
    means = np.array([[mean for mean, *_ in row] for row in cells])
    image = ax.imshow(means, origin="lower", cmap=MAP, interpolation="nearest", aspect="auto")
    for y, row in enumerate(cells):
        for x, (mean, low, high) in enumerate(row):
            text = plus_minus(mean, (high - low) / 2).replace(" ± ", "\n± ") if np.isfinite(mean) else "no value"
            color = "w" if np.asarray(image.norm(np.array(mean))) < 0.6 else "k" if np.isfinite(mean) else theme.ink()
            ax.text(x, y, text, ha="center", va="center", fontsize=style.SMALL, color=color)
    ax.set_yticks(range(len(cells)), [appearance.escaped(value) for value in found.values(1)])
    ax.set_ylabel(appearance.escaped(found.over[1]))
    return ax

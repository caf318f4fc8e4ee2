"""Lay out many small pictures in one pair of axes."""

from collections.abc import Sequence

import numpy as np

from landscape.plots import style
from landscape.plots.figure import Axes

GAP = 0.06  # between pictures, as a share of their width


def mosaic(ax: Axes, rows: Sequence[Sequence[np.ndarray | None]], columns: Sequence[str], names: Sequence[str]) -> Axes:
    """Draw rows of square pictures (height, width, 3) in [0, 1] with labelled rows and columns; None stays empty."""
    for i, row in enumerate(rows):
        for j, picture in enumerate(row):
            if picture is not None:
                low, high = GAP / 2, 1 - GAP / 2
                extent = (j + low, j + high, i + high, i + low)
                ax.imshow(picture, extent=extent, interpolation="nearest", vmin=0.0, vmax=1.0, aspect="auto")
    ax.set(xlim=(0, len(columns)), ylim=(len(rows), 0))
    ax.set_aspect("equal")
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=style.SMALL)
    ax.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=style.SMALL)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, pad=1)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax

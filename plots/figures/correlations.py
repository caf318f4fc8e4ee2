"""Draw two numbers of the networks of a study against each other, with what their correlation is."""

from collections.abc import Sequence

import numpy as np

from landscape.plots import broken, style
from landscape.plots.appearance import OTHERS, escaped
from landscape.plots.figure import Axes, Figure, Look
from landscape.studies.correlations import Correlation, in_words

COLUMNS = 3  # panels side by side
NOTE = (
    "Points: means of networks over seeds; error bars: 95 % intervals by Student's t, from four seeds on. Tau: "
    "Kendall's rank correlation over all networks, with its 95 % interval by resampling them with all their "
    "seeds{within}. A correlation over networks of several kinds may be a difference between the kinds."
)


def page(found: Sequence[Correlation]) -> Figure:
    """A panel per pair of numbers."""
    groups = sorted({group for one in found for group in one.groups})
    looks = {group: Look(escaped(group), *OTHERS[i % len(OTHERS)], " ") for i, group in enumerate(groups)}
    columns = min(COLUMNS, len(found))
    note = NOTE.format(within=", and of pairs of one group" if len(groups) > 1 else "")
    legend = list(looks.values()) if len(groups) > 1 else []
    figure, axes = style.beside([], [], len(found), height=2.5, columns=columns, legend=legend, note=note)
    for ax, one in zip(axes, found, strict=True):
        draw(one, ax, looks)
    return figure


def draw(found: Correlation, ax: Axes, looks: dict[str, Look]) -> Axes:
    """Draw a point with error bars per network, in the colour of its group."""
    for group, x, y in zip(found.groups, found.x, found.y, strict=True):
        look = looks[group]
        ax.errorbar(
            [x[0]], [y[0]], xerr=broken.bars(*x), yerr=broken.bars(*y), color=look.color, marker=look.marker,
            elinewidth=0.8, linestyle="none",
        )  # fmt: skip
    within = f"\nwithin groups {in_words(found.within)}" if np.isfinite(found.within[0]) else ""
    ax.set_title(f"tau {in_words(found.over_all)}{within}", fontsize=style.SMALL)
    ax.set(xlabel=escaped(found.names[0]), ylabel=escaped(found.names[1]))
    return ax

"""Lay out every figure: paper widths, 8 pt, the protocol as a caption, editable text in PDF and SVG."""

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots.appearance import escaped
from landscape.plots.figure import Axes, Draw, Figure, Line2D, Look, Patch
from landscape.plots.theme import COLUMN as COLUMN
from landscape.plots.theme import PAGE as PAGE
from landscape.plots.theme import RC as RC
from landscape.plots.theme import captioned, muted, narrow, page_width, panel_width, title
from landscape.results import reader
from landscape.statistics.stored import has_intervals

LINE_WORDS: dict[str, str] = {"-": "solid", "--": "dashed", "-.": "dash-dotted", ":": "dotted"}
SMALL = 6  # pt, of captions
LINE = 1.35 * SMALL / 72  # inches per line of a caption
LEGEND_LINE = 0.135  # inches per row of a legend
INTERVAL = "95 %"
WARNING = "#c2500a"  # readable on white and on black
GAP = 0.06  # between pictures, as a share of their width


def page(
    results: Sequence[xr.Dataset],
    looks: Sequence[Look],
    *,
    height: float,
    width: float | None = None,
    legend: Sequence[Look | Line2D | Patch] = (),
    note: str = "",
    caption: str = "",
) -> Figure:
    """An empty figure with a legend, the protocol and a note below the space for its axes.

    Their size is estimated first, so that nothing overlaps or is cut off. `height` is that of the space for the axes,
    `width` that of the figure (default: that of the style), in inches. The legend has as many columns as fit. A caption
    replaces the protocol. Sentences of the note about 95 % intervals stand where a result has one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from landscape.plots.notebook import Page

    width = width or page_width()
    # A digit of DejaVu Sans is 0.64 em wide, running text 0.55: the estimate errs on the safe side.
    if any(data.attrs.get("errors_over") == "seeds" for data in results):
        note = re.sub(r"(intervals) over [\w-]+", r"\1 over seeds", note)
    if results and not any(map(has_intervals, results)):
        note = " ".join(sentence for sentence in re.split(r"(?<=\.) ", note) if INTERVAL not in sentence)
    text = f"{caption or (protocol(results, looks) if results else '')} {note}".strip()
    under = textwrap.wrap(text, int(72 * width / (0.56 * SMALL))) if captioned() == "text" else []
    warning = textwrap.wrap(unfinished(results, looks), int(72 * width / (0.6 * SMALL)))
    size = RC["legend.fontsize"]
    handles = [entry.legend_handle() if isinstance(entry, Look) else entry for entry in legend]
    labels = [fitted(str(handle.get_label()), width - 0.5, size) for handle in handles]
    longest = max(map(len, labels), default=0)
    columns = max(1, min(len(labels), int(72 * width / (0.6 * size * (longest + 8)))))
    rows = math.ceil(len(labels) / columns) + sum(label.count("\n") for label in labels)
    heading = fitted(escaped(title()), width, RC["font.size"] + 1)
    caption_height = (len(under) + len(warning)) * LINE + 0.06
    legend_height = rows * LEGEND_LINE + (0.12 if legend else 0.0)
    total = height + caption_height + legend_height + (0.19 * (heading.count("\n") + 1) if heading else 0.0)
    figure = Page(figsize=(width, total), layout="compressed")
    figure.caption = text
    FigureCanvasAgg(figure)
    bottom = (caption_height + legend_height) / total
    figure.get_layout_engine().set(rect=(0.0, bottom, 1.0, 1.0 - bottom))  # type: ignore[union-attr, call-arg]
    small: dict[str, Any] = {"fontsize": SMALL, "color": muted(), "linespacing": 1.2}
    figure.text(0.5, 0.03 / total, "\n".join(under), ha="center", va="bottom", **small)
    if warning:
        mark = small | {"color": WARNING, "weight": "bold"}
        figure.text(0.5, 0.03 / total + len(under) * LINE / total, "\n".join(warning), ha="center", va="bottom", **mark)
    if heading:
        figure.suptitle(heading, fontsize=RC["font.size"] + 1)
    if legend:
        figure.legend(
            handles=handles, labels=labels, fontsize=size, ncols=columns, loc="lower center",
            bbox_to_anchor=(0.5, caption_height / total), frameon=False, borderaxespad=0.1, labelspacing=0.3,
            handlelength=2.6,
        )  # fmt: skip
    return figure


def panels(
    results: Sequence[xr.Dataset],
    looks: Sequence[Look],
    *,
    aspect: float,
    note: str = "",
    share: bool = True,
    projection: str | None = None,
    also: Sequence[str] = (),
    legend: Sequence[Look | Line2D | Patch] = (),
    bar: float = 0.0,
    most: int = 4,
) -> tuple[Figure, list[Axes]]:
    """One titled panel per result, side by side, `aspect` times as high as wide; then one per title in `also`.

    The fraction `bar` of the width stays free, for a colour bar. `most` panels are side by side, half of them in one
    column of a paper.
    """
    n = len(results) + len(also)
    columns = min(n, most // 2) if narrow() else min({1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3}.get(n, 4), most)
    rows = math.ceil(n / columns)
    width = panel_width() if n == 1 else page_width()
    size = title_size(columns)
    aspect *= 0.5 if width == PAGE and n == 1 else 1.0  # a single panel need not be as high as the page
    titles = [fitted(look.label, (1 - bar) * width / columns, size) for look in looks]
    titles += also
    lines = max(text.count("\n") + 1 for text in titles)
    height = rows * (aspect * width / columns + lines * 1.3 * size / 72 + 0.1)
    figure = page(results, looks, height=height, width=width, legend=legend, note=note)
    axes = grid(figure, n, columns, sharex=share, sharey=share, subplot_kw={"projection": projection})
    for i, (ax, text) in enumerate(zip(axes, titles, strict=True)):
        ax.set_title(text, fontsize=size)
        if share and i + columns >= n:
            ax.tick_params(labelbottom=True)  # the lowest of its column, though perhaps not in the last row
    return figure, axes


def overlaid(
    results: Sequence[xr.Dataset], looks: Sequence[Look], draw: Draw, *, height: float, **how: Any
) -> tuple[Figure, Axes]:
    """All results over each other in one pair of axes, `height` high; `how` is of `page`."""
    figure = page(results, looks, height=height, **how)
    ax = figure.subplots()
    for data, look in zip(results, looks, strict=True):
        draw(data, ax, look=look)
    return figure, ax


def beside(
    results: Sequence[xr.Dataset],
    looks: Sequence[Look],
    count: int,
    *,
    height: float,
    columns: int = 0,
    most: int = 4,
    sharey: bool = False,
    **how: Any,
) -> tuple[Figure, list[Axes]]:
    """Panels, `height` high, in so many columns, or as many as have 1.5 inches each; `how` is of `page`."""
    columns = columns or min(count, most, int(page_width() / 1.5))
    figure = page(results, looks, height=height * math.ceil(count / columns), **how)
    return figure, grid(figure, count, columns, sharey=sharey)


def colour_bar(figure: Any, axes: Any, norm: Any, colours: Any, label: str, **how: Any) -> Any:
    """A colour bar beside some axes, for a `norm` or both ends of a linear one; `how` is of matplotlib's."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    norm = Normalize(*norm) if isinstance(norm, tuple) else norm
    return figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, **{"aspect": 30, "pad": 0.02, **how})


def grid(figure: Any, count: int, columns: int, **how: Any) -> list[Axes]:
    """So many axes in rows of `columns`; the last row may have fewer."""
    axes = figure.subplots(-(-count // columns), columns, squeeze=False, **how).ravel()
    for ax in axes[count:]:
        ax.remove()
    return list(axes[:count])


def by_network(
    results: Sequence[xr.Dataset], looks: Sequence[Look], parts: int, networks: int, *, height: float, **how: Any
) -> tuple[Figure, Any, bool]:
    """Axes (parts, networks), `height` high each: a column per network, or a lower row where it would be too narrow.

    Axes of a part share their vertical scale. The last value says whether networks are columns; `how` is of `page`.
    """
    columns = page_width() / networks >= 1.2
    figure = page(results, looks, height=height * (parts if columns else 0.8 * networks), **how)
    if columns:
        return figure, figure.subplots(parts, networks, sharey="row", squeeze=False), True
    return figure, figure.subplots(networks, parts, sharey="col", squeeze=False).T, False


def label_outer(axes: Sequence[Axes], *, same: bool = True) -> None:
    """Shrink axis labels to the panels; for panels with the same axes, label the outermost only."""
    places = [ax.get_subplotspec() for ax in axes]
    lowest = {place.colspan.start: i for i, place in enumerate(places) if place is not None}
    for i, (ax, place) in enumerate(zip(axes, places, strict=True)):
        if place is None:
            continue
        columns = place.get_gridspec().ncols
        size = title_size(columns)
        side = (0.75 if same else 0.55) * page_width() / columns if len(axes) > 1 else COLUMN
        left, low = place.is_first_col() or not same, lowest[place.colspan.start] == i or not same
        ax.set_ylabel(fitted(ax.get_ylabel(), side, size) if left else "", fontsize=size)
        ax.set_xlabel(fitted(ax.get_xlabel(), side, size) if low else "", fontsize=size)


def title_size(columns: int) -> float:
    """Size in pt of titles and labels of panels side by side."""
    return float(RC["axes.titlesize"]) if page_width() / columns > 2 else SMALL + 1


def asinh(ax: Axes, side: str, width: float) -> None:
    """Set a scale that is linear within ±width and logarithmic beyond, without crowded labels around zero."""
    from matplotlib.ticker import LogFormatterSciNotation

    (ax.set_xscale if side == "x" else ax.set_yscale)("asinh", linear_width=width)
    axis = ax.xaxis if side == "x" else ax.yaxis
    power = LogFormatterSciNotation()
    power.set_axis(axis)
    axis.set_major_formatter(lambda value, _: "0" if value == 0 else power(value) if abs(value) > 1.5 * width else "")


def whole_numbers(ax: Axes) -> None:
    """Label the x axis at whole numbers only, as one of steps, epochs or frames, also where few of them are shown."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def log_if_wide(ax: Axes, values: np.ndarray) -> None:
    """A logarithmic vertical axis where the positive values are wide."""
    if is_wide(values[values > 0]):
        ax.set_yscale("log")


def is_wide(values: np.ndarray) -> bool:
    """Whether values are positive and span more than a factor of 30, for which an axis is logarithmic."""
    known = values[np.isfinite(values)]
    return bool(known.size and known.min() > 0 and known.max() > 30 * known.min())


def add_headroom(ax: Axes, share: float) -> None:
    """Lengthen the vertical axis at its upper end by a share of its height, on any scale."""
    ends = ax.transAxes.transform([(0.0, 0.0), (0.0, 1.0 + share)])
    low, high = ax.transData.inverted().transform(ends)[:, 1]
    ax.set_ylim(low, high)


def write_centred(ax: Axes, text: str, **look: Any) -> None:
    """Write why axes are empty."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", color=muted(), **look)


def fitted(text: str, width: float, size: float, lines: int = 3) -> str:
    """Text wrapped to a width in inches, with an ellipsis after the last line that is allowed."""
    return textwrap.fill(text, max(8, int(72 * width / (0.58 * size)) - 2), max_lines=lines, placeholder="…")


def unfinished(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> str:
    """Which results are unfinished, and how much of them is there; "" if none is."""
    parts = [(look.label, reader.unfinished(data)) for data, look in zip(results, looks, strict=True)]
    named = [f"{label} {part}" for label, part in parts if part]
    return f"Unfinished: {', '.join(named)}." if named else ""


def protocol(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> str:
    """The protocol of the results: once if all share it, else by label."""
    labels: dict[str, list[str]] = {}
    statistics_differ = any(data.attrs.get("statistics", "frozen") != "frozen" for data in results)
    for data, look in zip(results, looks, strict=True):
        text = str(data.attrs.get("protocol", "") or "protocol not stored")
        if statistics_differ and "statistics" in data.attrs:
            text += f", batch-norm statistics {data.attrs['statistics']}"
        if len(results) == 1 and data.attrs.get("not_moved", "none") != "none":
            text += f", not moved: {data.attrs['not_moved']}"
        labels.setdefault(escaped(text), []).append(look.label)
    if len(labels) == 1:
        return f"{next(iter(labels))}."
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in labels.items()) + "."


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
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns, fontsize=SMALL)
    ax.set_yticks(np.arange(len(rows)) + 0.5, names, fontsize=SMALL)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, pad=1)
    for side in ax.spines.values():
        side.set_visible(False)
    return ax

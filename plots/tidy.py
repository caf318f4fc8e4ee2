"""Make a drawn figure fit its width: labels wrapped to their axes, tick labels that would touch left out."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from landscape.plots.theme import narrow

CROWDED = "crowded"  # the mark (gid) of texts in axes that are left out where they would cover each other
GAP = 1.5  # pt between neighbouring tick labels at least


def tidied(figure: Any) -> Any:
    """Wrap long labels, lay the figure out once, and hide tick labels that touch; returns the figure.

    The layout is fixed afterwards, so that saving does not repeat it. Nothing is drawn here: that costs as much as it.
    """
    import matplotlib

    if narrow():
        for ax in figure.axes:
            _wrap(ax)
    plain = [ax for ax in label_decades(figure).axes if ax.get_visible() and ax.axison and ax.name == "rectilinear"]
    shown = figure.dpi
    figure.dpi = matplotlib.rcParams["savefig.dpi"]  # text is a little wider at some resolutions than at others
    if figure.subfigs:  # a compressed layout of axes in subfigures fails after the first of its passes
        figure.set_layout_engine("constrained", **figure.get_layout_engine().get())
    engine = figure.get_layout_engine()
    engine.execute(figure)
    if narrow() and (beyond := min(ax.get_tightbbox().x0 for ax in figure.axes)) < 0:
        left, bottom, width, height = engine.get()["rect"]  # labels beside equal scales reach further than computed
        share = -beyond / figure.bbox.width
        engine.set(rect=(left + share, bottom, width - share, height))
        engine.execute(figure)
    for ax in plain:
        ax.apply_aspect()  # as drawing does: what stands at points of equal scales moves with them
    along = {ax: _thinned(ax.xaxis, 0) for ax in plain}
    for ax in plain:
        _thinned(ax.yaxis, 1)
        _sparse([text for text in ax.texts if text.get_gid() == CROWDED])
    for row in _rows(plain):
        for left, right in pairwise(row):
            if along[left] and along[right]:
                last, first = along[left][-1].get_window_extent(), along[right][0].get_window_extent()
                if _touch(last, first, 0, _gap(figure, 0)):
                    along[right].pop(0).set_visible(False)
    figure.set_layout_engine(None)  # with "none", saving would draw the figure twice
    figure.dpi = shown
    return figure


def label_decades(figure: Any) -> Any:
    """Give logarithmic axes with fewer than two powers of ten, such as 6 x 10^0, round numbers; returns the figure.

    Beyond 1e-4 and 1e5 a factor stays, since the number would be long.
    """
    from matplotlib.ticker import LogFormatterSciNotation, NullFormatter

    flat = (ax for ax in figure.axes if ax.name == "rectilinear")
    for axis in (axis for ax in flat for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"):
        texts = [label.get_text() for label in _shown(axis)]
        if len(texts) == 1 or any(r"\times" in text for text in texts):
            low, high = sorted(axis.get_view_interval())
            short = 1e-4 < low < high < 1e5
            axis.set_ticks(round_ticks(low, high))
            axis.set_major_formatter("{x:g}" if short else LogFormatterSciNotation(minor_thresholds=(np.inf, np.inf)))
            axis.set_minor_formatter(NullFormatter())
    return figure


def round_ticks(low: float, high: float) -> np.ndarray:
    """Round numbers in a range of less than two decades, not too many."""
    coarse, finer = (1, 2, 5), (1, 1.5, 2, 3, 5, 7)
    for within in (coarse, finer, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), np.arange(10, 100) / 10):
        series = np.outer(10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1), within).ravel()
        ticks = series[(series >= low) & (series <= high)]
        if len(ticks) >= 3:
            return np.asarray(ticks[:: max(1, len(ticks) // 8)])
    return np.array([low, high])


def _wrap(ax: Any) -> None:
    """Break labels and titles that are longer than the axes; the width is that of the grid's cell."""
    place = ax.get_subplotspec()
    if place is None or ax.name == "3d":
        return
    cell = place.get_position(ax.figure).width * ax.figure.bbox.width / ax.figure.dpi
    for text, width in ((ax.xaxis.label, 1.05 * cell), (ax.title, 1.15 * cell), (ax.yaxis.label, 1.6)):
        words = text.get_text()
        if words and "\n" not in words and 0.55 * text.get_fontsize() * len(words) / 72 > width:
            text.set_text(_broken(words, width, text.get_fontsize()))


def _broken(text: str, width: float, size: float) -> str:
    """Text in lines of a width in inches, broken between words only."""
    return textwrap.fill(text, max(8, int(72 * width / (0.55 * size))), break_long_words=False)


def _shown(axis: Any) -> list[Any]:
    """The labels of the ticks that are drawn, in order."""
    axis.get_majorticklabels()  # places the ticks for the present size
    low, high = sorted(axis.get_view_interval())
    margin = 1e-6 * (high - low)
    every = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    ticks = [tick for tick in every if low - margin <= tick.get_loc() <= high + margin]
    both = [label for tick in ticks for label in (tick.label1, tick.label2)]
    labels = [label for label in both if label.get_visible() and label.get_text()]
    side = 0 if axis.axis_name == "x" else 1
    return sorted(labels, key=lambda label: label.get_window_extent().min[side])


def _thinned(axis: Any, side: int) -> list[Any]:
    """The labels of an axis that stay: every second, third, ... where they would touch; the others are hidden."""
    labels = _shown(axis)
    boxes = [label.get_window_extent() for label in labels]
    gap = _gap(axis.get_figure(root=True), side)
    kept: Sequence[Any] = []
    for step in range(1, len(labels) + 1):
        kept = labels[::step]
        if not any(_touch(one, other, side, gap) for one, other in pairwise(boxes[::step])):
            break
    for label in labels:
        label.set_visible(label in kept)
    return list(kept)


def _sparse(texts: Sequence[Any]) -> None:
    """Hide texts that would cover one before."""
    shown: list[Any] = []
    for text in texts:
        box = text.get_window_extent()
        text.set_visible(not any(box.overlaps(other) for other in shown))
        shown += [box] if text.get_visible() else []


def _gap(figure: Any, side: int) -> float:
    """The distance that neighbouring tick labels need, in pixels, along x (side 0) or y (side 1)."""
    return GAP * figure.dpi / 72 if side == 0 else 0.0


def _touch(first: Any, second: Any, side: int, gap: float) -> bool:
    """Whether a label comes too close to the next one along a side, by the boxes of both."""
    return bool(
        first.max[side] + gap > second.min[side]
        and first.min[1 - side] < second.max[1 - side]
        and second.min[1 - side] < first.max[1 - side]
    )


def _rows(axes: Sequence[Any]) -> list[list[Any]]:
    """Axes that stand beside each other, from left to right."""
    rows: dict[int, list[Any]] = {}
    for ax in axes:
        rows.setdefault(round(ax.get_window_extent().y0), []).append(ax)
    return [sorted(row, key=lambda ax: float(ax.get_window_extent().x0)) for row in rows.values()]

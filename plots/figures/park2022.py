"""Lay out several networks as the multi-panel figures of Park & Kim 2022: weight space, and feature maps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import FIGURES, depth, plane, style
from landscape.plots.appearance import escaped
from landscape.plots.figure import Figure, Look
from landscape.plots.figures import fourier_depth, hessian, lesion, surface_3d, trajectory, variance
from landscape.plots.headlines import change
from landscape.plots.theme import narrow

HEIGHT = 2.3  # inches of a row of panels
Results = Sequence[tuple[xr.Dataset, Look]]


@dataclass(frozen=True)
class Part:
    """One part of a figure: what it is called, the entry of `FIGURES` whose results it shows, and how it is drawn."""

    title: str
    figure: str
    draw: Callable[[Any, Results], None]
    width: float = 1.0
    note: str = ""  # for the caption


def surfaces(figure: Any, results: Results) -> None:
    """A mesh per network on one vertical scale."""
    columns = math.ceil(math.sqrt(len(results)))
    rows = math.ceil(len(results) / columns)
    span = plane.bowl_range([data for data, _ in results], surface_3d.SHARE)
    for i, (data, look) in enumerate(results):
        ax = figure.add_subplot(rows, columns, i + 1, projection="3d")
        surface_3d.draw(data, ax, span=span)
        ax.set_title(style.fitted(look.label, 1.5, style.SMALL, 2), fontsize=style.SMALL, color=look.color, pad=-4)


def trajectories(figure: Any, results: Results) -> None:
    """Distance and angle of all runs, seen from their ends."""
    ax = figure.add_subplot(projection="polar")
    for data, look in results:
        trajectory.draw_polar(data, ax, look)


def spectra(figure: Any, results: Results) -> None:
    """The negative and the positive eigenvalues of all networks."""
    axes = tuple(figure.subplots(1, 2, sharey=True))
    ranges = hessian.axis_ranges([data for data, _ in results])
    for data, look in results:
        hessian.draw(data, axes, look=look, ranges=ranges)
    hessian.even_out(axes, [data for data, _ in results])
    for ax in axes:
        ax.set_xlabel("")
    figure.supxlabel("Hessian eigenvalue", fontsize=8)


def over_depth(draw: Callable[..., Any]) -> Callable[[Any, Results], None]:
    """All networks over depth, on one pair of axes, the bands of several as strips."""

    def drawn(figure: Any, results: Results) -> None:
        ax = figure.subplots()
        for data, look in results:
            draw(data, ax, look=look, shade=len(results) == 1)
        if len(results) > 1:
            depth.strips([data for data, _ in results], [look for _, look in results], ax)

    return drawn


def lesions(figure: Any, results: Results) -> None:
    """The bars of every network below each other; units from the first to the last."""
    axes = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for ax, (data, look) in zip(axes, results, strict=True):
        lesion.bars(data, ax, change(data), "")
        title = style.fitted(look.label, 2.0, style.SMALL, 1)
        ax.set_title(title, fontsize=style.SMALL, color=look.color, loc="left", pad=1)
    axes[-1].set_xlabel("removed unit, first to last")
    figure.supylabel(" / ".join(dict.fromkeys(lesion.LABELS[change(data)] for data, _ in results)), fontsize=8)


PAGES: Mapping[str, Sequence[Part]] = {
    "park2022_weights": (
        Part("loss surface", "surface_3d", surfaces, 1.1, "Meshes share one vertical scale."),
        Part("training", "trajectory", trajectories, 0.9),
        Part("Hessian spectrum", "hessian", spectra, 1.2),
    ),
    "park2022_features": (
        Part(
            "Fourier analysis",
            "fourier_depth",
            over_depth(fourier_depth.draw),
            note=f"Error bars: 95 % intervals. {depth.STRIPS}",
        ),
        Part("variance of feature maps", "variance", over_depth(variance.draw)),
        Part("lesion study", "lesion", lesions, note="Removed: attention (hatched), MLPs (dotted), others."),
    ),
}


def missing(parts: Sequence[Part], found: Mapping[str, Results]) -> list[str]:
    """Commands of the parts that no result shows."""
    return [f"landscape {FIGURES[part.figure].probe}" for part in parts if not found[part.figure]]


def page(parts: Sequence[Part], found: Mapping[str, Results]) -> Figure:
    """One row of parts, in a narrow figure one below the other; those without results are named in the caption."""
    shown = [part for part in parts if found[part.figure]]
    looks = {look.label: look for part in shown for _, look in found[part.figure]}
    lacking = missing(parts, found)
    protocols: dict[str, list[str]] = {}
    for part in shown:
        results, among = zip(*found[part.figure], strict=True)
        protocols.setdefault(style.protocol(results, among), []).append(part.title)
    caption = " ".join(f"{', '.join(titles).capitalize()}: {text}" for text, titles in protocols.items())
    notes = [
        *(part.note for part in shown if part.note),
        *([f"Not measured: {', '.join(lacking)}."] if lacking else []),
    ]
    height = HEIGHT * (len(shown) if narrow() else 1)
    figure = style.page([], [], height=height, legend=list(looks.values()), caption=caption, note=" ".join(notes))
    grid = (len(shown), 1) if narrow() else (1, len(shown))
    ratios: dict[str, Any] = {} if narrow() else {"width_ratios": [part.width for part in shown]}
    for i, (part, under) in enumerate(zip(shown, np.ravel(figure.subfigures(*grid, **ratios)), strict=True)):
        under.suptitle(f"({'abc'[i]}) {part.title}", fontsize=8)
        part.draw(under, found[part.figure])
    return figure


def one_each(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> list[tuple[xr.Dataset, Look]]:
    """The last result of every checkpoint, under the checkpoint's name alone."""
    last = {str(data.attrs.get("label", "")): (data, look) for data, look in zip(results, looks, strict=True)}
    return [(data, replace(look, label=escaped(label))) for label, (data, look) in last.items()]

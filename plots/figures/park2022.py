"""Lay out several networks as figures of Park & Kim 2022: weights (Fig. 1), spectra (4, 6), features, AlterNet (12)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import FIGURES, broken, depth, plane, style, theme
from landscape.plots.appearance import escaped, label_of
from landscape.plots.figure import Figure, Look
from landscape.plots.figures import (
    build_up,
    fourier_depth,
    hessian,
    hessian_phases,
    lesion,
    objective,
    surface_3d,
    trajectory,
    variance,
)
from landscape.plots.headlines import change
from landscape.results.protocols import stored
from landscape.results.reader import parameters_of
from landscape.statistics.stored import ends_of

HEIGHT = 2.3  # inches of a row of panels
BARS, MANY = 0.42, 5  # inches of a network's bars; networks below each other at most
OF_TRAINER = re.compile(r"init|warmup|final|epoch_\d+")  # names of the snapshots of a run
Results = Sequence[tuple[xr.Dataset, Look]]


def at_end(results: Results) -> list[tuple[xr.Dataset, Look]]:
    """The last snapshot of every run, and every other checkpoint."""
    return [item for run in _runs(results) for epoch, item in run if epoch == run[-1][0]]


def early(results: Results) -> list[tuple[xr.Dataset, Look]]:
    """The first trained snapshot of every run that has a later one, in the look of the last."""
    trained = [[step for step in run if step[0] > 0] for run in _runs(results)]
    return [(run[0][1][0], run[-1][1][1]) for run in trained if run and run[0][0] < run[-1][0]]


def built_up(results: Results) -> list[tuple[xr.Dataset, Look]]:
    """The networks of the model that has the most numbers of self-attentions, at least two, all units of each known."""
    whole = [
        (data, look)
        for data, look in at_end(results)
        if "intact_accuracy" in data.attrs and not any(parameters_of(data).get(key) for key in lesion.PARTIAL)
    ]
    kinds: dict[tuple[str, str], list[tuple[xr.Dataset, Look]]] = {}
    for data, look in whole:
        kinds.setdefault((str(data.attrs.get("model", "")), str(data.attrs.get("data", ""))), []).append((data, look))
    numbers = {key: len({_attentions(data) for data, _ in of}) for key, of in kinds.items()}
    most = max(numbers, key=lambda key: numbers[key], default=("", ""))
    return kinds[most] if numbers.get(most, 0) > 1 else []


def _runs(results: Results) -> list[list[tuple[float, tuple[xr.Dataset, Look]]]]:
    """Epochs and results by run, the newest of each checkpoint; what the trainer's names do not tell is no run."""
    found: dict[tuple[str, ...], dict[str, tuple[float, tuple[xr.Dataset, Look]]]] = {}
    for data, look in results:
        path, label = PurePath(str(stored(data, "spec").get("checkpoint") or "")), label_of(data)
        epoch = hessian_phases.epoch(data)
        named = OF_TRAINER.fullmatch(path.stem) and np.isfinite(epoch)
        key = (str(path.parent), str(data.attrs.get("model", ""))) if named else (label,)
        found.setdefault(key, {})[label] = epoch if named else 0.0, (data, replace(look, label=escaped(label)))
    return [sorted(run.values(), key=lambda step: step[0]) for run in found.values()]


def _attentions(data: xr.Dataset) -> int:
    return int((data["kind"] == "msa").sum())


@dataclass(frozen=True)
class Part:
    """One part of a figure: what it is called, the entry of `FIGURES` whose results it shows, and how it is drawn."""

    title: str
    figure: str
    draw: Callable[[Any, Results], None]
    width: float = 1.0
    note: str | Callable[[Results], str] = ""  # for the caption
    choose: Callable[[Results], list[tuple[xr.Dataset, Look]]] = at_end
    of: str = ""  # what is measured where `choose` finds nothing
    cues: bool = True  # whether the networks are told apart by their looks, which the legend names then
    height: Callable[[Results], float] = lambda _: HEIGHT  # inches


def surfaces(figure: Any, results: Results) -> None:
    """A mesh per network on one vertical scale, of the objective as published where every result has one."""
    (_, _, width, height), count = figure.bbox.bounds, len(results)
    columns = max(range(1, count + 1), key=lambda n: min(width / n, height / math.ceil(count / n)))
    rows = math.ceil(count / columns)
    heights = [objective.rise(data) if _regularised(results) else data for data, _ in results]
    span = plane.bowl_range(heights, surface_3d.SHARE)
    for i, (data, (_, look)) in enumerate(zip(heights, results, strict=True)):
        ax = figure.add_subplot(rows, columns, i + 1, projection="3d")
        surface_3d.draw(data, ax, span=span)
        title = style.fitted(look.label, min(1.5, 0.9 * width / columns / figure.dpi), style.SMALL, 2)
        ax.set_title(title, fontsize=style.SMALL, color=look.color, pad=-4)


def _regularised(results: Results) -> bool:
    return all("objective" in data and objective.decay(data) > 0 for data, _ in results)


def _height(results: Results) -> str:
    height = "loss + weight decay x l2, above its least value" if _regularised(results) else "loss"
    return f"Meshes: {height}, on one vertical scale."


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


def _epochs(results: Results) -> str:
    epochs = [f"{hessian_phases.epoch(data):.3g} of {look.label}" for data, look in results]
    return f"Early in training: epoch {', '.join(epochs)}."


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
    """The bars of every network below each other, of many in two columns; units from the first to the last."""
    axes = figure.subplots(*_places(results), squeeze=False, sharey=True).T.flat
    for ax in axes[len(results) :]:
        ax.set_axis_off()
    for ax, (data, look) in zip(axes, results, strict=False):
        lesion.bars(data, ax, change(data), "")
        title = style.fitted(look.label, 1.7 / _places(results)[1], style.SMALL, 1)
        ax.set_title(title, fontsize=style.SMALL, color=look.color, loc="left", pad=1)
    figure.supxlabel("removed unit, first to last", fontsize=8)
    figure.supylabel(" / ".join(dict.fromkeys(lesion.LABELS[change(data)] for data, _ in results)), fontsize=8)


def _places(results: Results) -> tuple[int, int]:
    """Rows and columns of bars."""
    columns = 1 if len(results) <= MANY else 2
    return math.ceil(len(results) / columns), columns


def by_attentions(figure: Any, results: Results) -> None:
    """Accuracy over the number of self-attentions, mean over seeds with its interval."""
    about = {key: str(results[0][0].attrs.get(key, "")) for key in ("model", "data")}
    accuracies = [(_attentions(data), float(data.attrs["intact_accuracy"])) for data, _ in results]
    rows = [about | {"msa": count, "accuracy": accuracy} for count, accuracy in accuracies]
    build_up.draw(rows, figure.subplots(), "accuracy")


def _seeds(results: Results) -> str:
    published = (str(results[0][0].attrs.get("model")), str(results[0][0].attrs.get("data"))) in build_up.PUBLISHED
    points = build_up.points([_attentions(data) for data, _ in results])
    return f"Build-up: accuracy of the intact networks. {points}{' Dotted: published.' * published}"


def robustness(figure: Any, results: Results) -> None:
    """Mean accuracy under corruption over that of clean samples, a point per network, a panel per data set."""
    of = list(dict.fromkeys(str(data.attrs.get("data", "")) for data, _ in results))
    for ax, name in zip(figure.subplots(1, len(of), squeeze=False)[0], of, strict=True):
        ax.set_title(style.fitted(escaped(name), 1.5, style.SMALL, 1) if len(of) > 1 else "", fontsize=style.SMALL)
        ax.set(xlabel="accuracy", ylabel="accuracy under corruption" if name == of[0] else "")
        for data, look in results:
            if str(data.attrs.get("data", "")) == name:
                value, (low, high) = float(data["mean_accuracy"]), map(float, ends_of(data, "mean_accuracy"))
                ax.errorbar(
                    [data.attrs["clean_accuracy"]], [value], yerr=broken.bars(value, low, high), color=look.color,
                    marker=look.marker, elinewidth=0.7,
                )  # fmt: skip


PAGES: Mapping[str, Sequence[Part]] = {
    "park2022_weights": (
        Part("loss surface", "surface_3d", surfaces, 1.1, _height),
        Part("training", "trajectory", trajectories, 0.9),
        Part("Hessian spectrum", "hessian", spectra, 1.2),
    ),
    "park2022_spectra": (
        Part("at the end of training", "hessian", spectra),
        Part("early in training", "hessian", spectra, note=_epochs, choose=early, of=" of early snapshots"),
    ),
    "park2022_features": (
        Part(
            "Fourier analysis",
            "fourier_depth",
            over_depth(fourier_depth.draw),
            note=f"Error bars: 95 % intervals. {depth.STRIPS}",
        ),
        Part("variance of feature maps", "variance", over_depth(variance.draw)),
        Part(
            "lesion study",
            "lesion",
            lesions,
            note="Removed: attention (hatched), MLPs (dotted), others.",
            height=lambda results: max(HEIGHT, 0.6 + BARS * _places(results)[0]),
        ),
    ),
    "park2022_alternet": (
        Part(
            "build-up",
            "lesion",
            by_attentions,
            note=_seeds,
            choose=built_up,
            of=" of networks that differ in their self-attentions",
            cues=False,
        ),
        Part(
            "robustness",
            "corruption",
            robustness,
            note="Robustness: mean over corruptions and severities; bars: 95 % intervals over images.",
        ),
    ),
}


def chosen(part: Part, results: Sequence[xr.Dataset], looks: Sequence[Look]) -> list[tuple[xr.Dataset, Look]]:
    """The results of a part, each under its checkpoint's name alone."""
    return part.choose(list(zip(results, looks, strict=True)))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def missing(parts: Sequence[Part], found: Sequence[Results]) -> list[str]:
    """Commands of the parts that no result shows."""
    return [f"landscape {FIGURES[part.figure].probe}{part.of}" for part, of in zip(parts, found, strict=True) if not of]


def page(parts: Sequence[Part], found: Sequence[Results]) -> Figure:
    """One row of parts, in a narrow figure one below the other; those without results are named in the caption."""
    shown = [(part, results) for part, results in zip(parts, found, strict=True) if results]
    looks = {look.label: look for part, results in shown if part.cues for _, look in results}
    lacking = missing(parts, found)
    protocols: dict[str, list[str]] = {}
    for part, results in shown:
        protocols.setdefault(style.protocol(*zip(*results, strict=True)), []).append(part.title)
    caption = " ".join(f"{_sentence(', '.join(titles))}: {text}" for text, titles in protocols.items())
    notes = [
        *(part.note if isinstance(part.note, str) else part.note(results) for part, results in shown if part.note),
        *([f"Not measured: {', '.join(lacking)}."] if lacking else []),
    ]
    heights = [part.height(results) for part, results in shown]
    height = sum(heights) if theme.narrow() else max(heights)
    about: dict[str, Any] = {"legend": list(looks.values()), "caption": caption, "note": " ".join(notes)}
    figure = style.page([], [], height=height, **about)
    if theme.narrow() and (beyond := figure.get_figheight() - theme.HIGHEST) > 0:
        figure = style.page([], [], height=height - beyond, **about)
    grid = (len(shown), 1) if theme.narrow() else (1, len(shown))
    widths: dict[str, Any] = {"width_ratios": [part.width for part, _ in shown]}
    ratios = {"height_ratios": heights} if theme.narrow() else widths
    panels = np.ravel(figure.subfigures(*grid, **ratios))
    for i, ((part, results), under) in enumerate(zip(shown, panels, strict=True)):
        under.suptitle(f"({'abc'[i]}) {part.title}", fontsize=8)
        part.draw(under, results)
    return figure

"""Draw accuracy, training NLL, error against it, and Hessian eigenvalues over one argument of trained networks.

Kernel sizes, patch sizes and numbers of heads, as Figures 7a, C.2, C.5 and C.6 of Park & Kim 2022 (arXiv 2202.06709).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape.plots import appearance, broken, style
from landscape.plots.figure import Axes, Figure
from landscape.studies import kinds
from landscape.studies.study import Number, Study

MEANING = (
    "Networks that differ in one argument alone: accuracy on test data, the error there against the NLL on training "
    "data, and the curvature. A network that is left of and above another one fits the training data better without "
    "generalising better; each point is one training run, whose seed may matter more than the argument."
)
NUMBERS = {  # measurement and quantity by the words of the axis
    "accuracy on test data": ("test", "accuracy"), "training NLL (nats)": ("train", "nll"), "": ("", ""),
    "largest Hessian eigenvalue": ("hessian", "mean_largest"), "negative eigenvalues (NEP)": ("hessian", "nep"),
    "positive eigenvalues (APE)": ("hessian", "ape"),
}  # fmt: skip
studies = kinds.sweep


def page(study: Study) -> Figure:
    """Accuracy, training NLL and error against it; the largest eigenvalue, NEP and APE, in six panels."""
    shown = list(study.cells.values())
    note = (
        "Points: training runs, with 95 % intervals over samples (eigenvalues: over mini-batches); lines: means over "
        f"runs of one value. Colours and words in the panel of the error: {study.argument}."
    )
    protocols = dict.fromkeys(str(data.attrs.get("protocol", "")) for data in shown)
    model = next(iter(study.networks.values())).configuration["model"]
    caption = f"{appearance.escaped(f'{model} over {study.argument}')}. {appearance.escaped('; '.join(protocols))}."
    figure = style.page([], [], height=3.8, caption=caption, note=note)
    for ax, (label, cell) in zip(figure.subplots(2, 3).flat, NUMBERS.items(), strict=True):
        if label:
            draw(study, ax, [one.number(*cell) for one in study.networks.values()], label)
        else:
            draw_fit(study, ax)
    return figure


def draw(study: Study, ax: Axes, found: Sequence[Number], label: str) -> Axes:
    """Draw a number of every run over the argument, and the mean over runs of one value as a line."""
    marker, colors = _look(study)
    places = [study.values.index(study.value(run)) for run in study.networks.values()]
    for i, (place, (value, low, high)) in enumerate(zip(places, found, strict=True)):
        turn, several = places[:i].count(place), places.count(place)  # runs of one value stand side by side
        at = place + 0.3 * (turn - (several - 1) / 2) / max(several, 2)
        ax.errorbar(
            [at], [value], yerr=broken.bars(value, low, high), color=colors[place], marker=marker, elinewidth=0.8
        )
    means = [
        np.mean([value for at, (value, *_) in zip(places, found, strict=True) if at == place])
        for place in range(len(study.values))
    ]
    ax.plot(range(len(means)), means, color="0.6", linewidth=0.9, zorder=0)
    ax.set_xticks(range(len(means)), study.values)
    ax.set(xlabel=study.argument, ylabel=label, xlim=(-0.4, len(means) - 0.6))
    if not np.isfinite([value for value, *_ in found]).any():
        style.write_centred(ax, "not measured", fontsize=style.SMALL)
    return ax


def draw_fit(study: Study, ax: Axes) -> Axes:
    """Draw the test error against the training NLL: a point for every run, labelled with the value of its argument."""
    marker, colors = _look(study)
    named: set[str] = set()
    for run in study.networks.values():
        value = study.value(run)
        color = colors[study.values.index(value)]
        nll, accurate = run.number("train", "nll"), run.number("test", "accuracy")
        error = tuple(1 - accurate[i] for i in (0, 2, 1))
        ax.errorbar(
            [nll[0]], [error[0]], xerr=broken.bars(*nll), yerr=broken.bars(*error), color=color, marker=marker,
            elinewidth=0.8,
        )  # fmt: skip
        if np.isfinite(nll[0] + error[0]) and value not in named:
            ax.annotate(value, (nll[0], error[0]), xytext=(3, 3), textcoords="offset points", fontsize=7, color=color)
            named.add(value)
    ax.set(xlabel="NLL on training data (nats)", ylabel="error on test data")
    if not any(measurement == "train" for _, measurement in study.cells):
        style.write_centred(ax, "not measured", fontsize=style.SMALL)
    return ax


def _look(study: Study) -> tuple[str, list[Any]]:
    """The marker of the network, and a colour for every value."""
    from matplotlib import colormaps

    kind = appearance.family(next(iter(study.cells.values())))
    marker = appearance.FAMILIES[kind][2] if kind in appearance.FAMILIES else appearance.OTHERS[0][1]
    return marker, [colormaps["viridis"](place) for place in np.linspace(0, 0.85, len(study.values))]

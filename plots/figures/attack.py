"""Draw the accuracy under attack over the size of the perturbation, FGSM beside PGD, all networks in each panel."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from landscape.plots import differences, headlines, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import intervals, stored
from landscape.statistics.paired import Difference, comparable, mcnemar, mean_difference, paired_t

MEANING = (
    "The accuracy on images whose pixels are changed by at most eps so that the loss rises, with bands of 95 % over "
    "images; eps 0 is the images as they are, and differences between networks are paired image by image. It is an "
    "upper bound on the robust accuracy, as a stronger attack may find more, and a weak attack such as FGSM says "
    "little about it."
)
NAMES = {"fgsm": "FGSM", "pgd": "PGD"}
EPS = "eps (of 255 grey levels)"


def draw(data: xr.Dataset, ax: Axes, *, look: Look, method: int = 0) -> Axes:
    """Draw the accuracy (the loss where there is none) under one attack over eps in grey levels of 255."""
    quantity = quantity_of(data)
    row = data.isel(method=method)
    shown = np.isfinite(row[quantity].values)
    eps, value, low, high = (
        values[shown] for values in (255 * row["eps"].values, row[quantity].values, *stored.ends_of(row, quantity))
    )
    intact = float(data.attrs.get(f"intact_{quantity}", np.nan))
    if np.isfinite(intact) and not (eps == 0).any():
        own = float(data.attrs.get(f"intact_{quantity}_se", np.nan))  # of an accuracy the number of samples says it
        of = intervals.share_interval if quantity == "accuracy" else intervals.positive_interval
        ends = of(intact, own, data.attrs.get("samples", np.nan))
        start = (0.0, intact, *ends)
        eps, value, low, high = (np.r_[one, rest] for one, rest in zip(start, (eps, value, low, high), strict=True))
    ax.fill_between(eps, low, high, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(eps, value, **look.cues, label=look.label)
    ax.set(xlabel=EPS, ylabel=f"{quantity} under attack")
    if quantity == "accuracy":
        ax.set_ylim(bottom=0.0)
    name = names_of(data)[method]
    ax.set_title(NAMES.get(name, name))
    return ax


def draw_difference(data: xr.Dataset, reference: xr.Dataset, ax: Axes, *, look: Look, method: str) -> Axes:
    """Draw the change of the accuracy (or loss) from another network on the same samples over eps, with its band."""
    quantity = quantity_of(data)
    eps = np.intersect1d(data["eps"].values, reference["eps"].values)
    mine, other = (samples_of(one, method, eps, quantity) for one in (data, reference))
    mean, (low, high) = mean_difference(mine, other, shares=quantity == "accuracy")
    ax.fill_between(255 * eps, low, high, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(255 * eps, mean, **look.cues)
    ax.axhline(0.0, color="0.5", linewidth=0.6, zorder=0)
    ax.set(xlabel=EPS, ylabel=f"difference in {quantity}")
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per attack, every network in each; below, networks on the same samples against the first one."""
    methods = list(dict.fromkeys(str(name) for data in results for name in data["method_name"].values))
    compared = alike(results)
    note = "Bands: 95 % intervals over images."
    if compared:
        note += f" {differences.note(looks[compared[0]].label)}"
    heights = [2.2, *([1.5] if compared else [])]
    figure = style.page(results, looks, height=sum(heights), legend=looks, note=note)
    same = len(set(map(quantity_of, results))) == 1
    grid = figure.subplots(
        len(heights), len(methods), squeeze=False, sharey="row" if same else False, sharex=True, height_ratios=heights
    )
    for column, method in zip(grid.T, methods, strict=True):
        for data, look in zip(results, looks, strict=True):
            names = names_of(data)
            if method in names:
                draw(data, column[0], look=look, method=names.index(method))
        for i in compared[1:]:
            first = results[compared[0]]
            if method in names_of(first) and method in names_of(results[i]):
                draw_difference(results[i], first, column[1], look=looks[i], method=method)
    style.label_outer(list(grid.flat), same=same)
    for ax in grid[:, 0]:
        ax.set_ylabel(ax.get_ylabel() or "accuracy")
    return figure


def alike(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of finished results on the same samples that hold the score of every sample."""
    able = [i for i, data in enumerate(results) if f"sample_{quantity_of(data)}" in data]
    return [able[i] for i in comparable([results[i] for i in able], quantity_of)]


def samples_of(data: xr.Dataset, method: str, eps: np.ndarray, quantity: str) -> np.ndarray:
    """The score of every sample under an attack at some eps, (eps, samples), in the order of the data."""
    one = data.isel(method=names_of(data).index(method), eps=np.searchsorted(data["eps"].values, eps))
    there = data["row"].values < one["samples"].transpose("eps", "batch").values[0][:, None]  # (batch, row)
    return np.asarray(one[f"sample_{quantity}"].transpose("eps", "batch", "row").values[:, there])


def names_of(data: xr.Dataset) -> list[str]:
    """The attacks of a result."""
    return [str(name) for name in data["method_name"].values]


def quantity_of(data: xr.Dataset) -> str:
    """The quantity to draw: the loss where it defines no accuracy."""
    return "accuracy" if headlines.change(data) == "accuracy_drop" else "loss"


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Of every attack that both have, with the largest perturbation that they share."""
    quantity, eps = quantity_of(data), np.intersect1d(data["eps"].values, other["eps"].values)[-1:]
    if quantity != quantity_of(other) or not eps.size:
        return {}
    found = {}
    for method in names_of(data):
        if method in names_of(other):
            mine, theirs = (samples_of(one, method, eps, quantity)[0] for one in (data, other))
            name = f"{NAMES.get(method, method)} at {255 * eps[0]:g}/255"
            found[name] = mcnemar(mine, theirs) if quantity == "accuracy" else paired_t(mine, theirs)
    return found

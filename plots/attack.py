"""Draw the accuracy under attack over the size of the perturbation, FGSM beside PGD, all networks in each panel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import Look
from landscape.plots.appearance import look as look_of
from landscape.plots.figure import Axes, Figure
from landscape.plots.headlines import Numbers, change

MEANING = (
    "The accuracy on images whose pixels are changed by at most eps so that the loss rises, with bands of 95 % over "
    "images; eps 0 is the images as they are. It is an upper bound on the robust accuracy, as a stronger attack may "
    "find more, and a weak attack such as FGSM says little about it."
)
QUANTILE = 1.96  # of a 95 % interval
NAMES = {"fgsm": "FGSM", "pgd": "PGD"}


def draw(data: xr.Dataset, ax: Axes, *, look: Look | None = None, method: int = 0) -> Axes:
    """Draw the accuracy (the loss where there is none) under one attack over eps in grey levels of 255."""
    look, quantity = look or look_of(data), quantity_of(data)
    row = data.isel(method=method)
    shown = np.isfinite(row[quantity].values)
    eps, value = 255 * row["eps"].values[shown], row[quantity].values[shown]
    half = QUANTILE * row[f"{quantity}_se"].fillna(0.0).values[shown]
    intact = float(data.attrs.get(f"intact_{quantity}", np.nan))
    if np.isfinite(intact) and not (eps == 0).any():
        eps, value, half = np.r_[0.0, eps], np.r_[intact, value], np.r_[0.0, half]
    ax.fill_between(eps, value - half, value + half, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(eps, value, color=look.color, marker=look.marker, linestyle=look.line, label=look.label)
    ax.set(xlabel="eps (of 255 grey levels)", ylabel=f"{quantity} under attack")
    if quantity == "accuracy":
        ax.set_ylim(bottom=0.0)
    ax.set_title(NAMES.get(str(data["method_name"].values[method]), str(data["method_name"].values[method])))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per attack, every network in each."""
    methods = list(dict.fromkeys(str(name) for data in results for name in data["method_name"].values))
    legend = [look.legend_handle() for look in looks]
    figure = style.page(results, looks, height=2.4, legend=legend, note="Bands: 95 % intervals over images.")
    same = len(set(map(quantity_of, results))) == 1
    axes = figure.subplots(1, len(methods), squeeze=False, sharey=same)[0]
    for ax, method in zip(axes, methods, strict=True):
        for data, look in zip(results, looks, strict=True):
            names = [str(name) for name in data["method_name"].values]
            if method in names:
                draw(data, ax, look=look, method=names.index(method))
    style.label_outer(list(axes), same=same)
    return figure


def quantity_of(data: xr.Dataset) -> str:
    """The quantity to draw: the loss where it defines no accuracy."""
    return "accuracy" if change(data) == "accuracy_drop" else "loss"


def headline(data: xr.Dataset) -> Numbers:
    """Accuracy as it is and under every attack of the largest eps that is finished."""
    quantity = quantity_of(data) if "accuracy" in data else "accuracy"
    if quantity not in data:
        return {}
    found: Numbers = {f"intact {quantity}": float(data.attrs.get(f"intact_{quantity}", np.nan))}
    for row, name in zip(data[quantity].values, data["method_name"].values, strict=True):
        finite = np.flatnonzero(np.isfinite(row))
        if finite.size:
            eps = 255 * float(data["eps"].values[finite[-1]])
            found[f"{NAMES.get(str(name), str(name))} at {eps:g}/255"] = float(row[finite[-1]])
    return found

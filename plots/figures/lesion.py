"""Draw accuracy drop and loss increase when one unit is removed, per unit (Park & Kim 2022, Fig. 10)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import xarray as xr

from landscape.plots import broken, style, theme
from landscape.plots.appearance import cut, escaped
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.headlines import change
from landscape.statistics.stored import half_width

MEANING = (
    "The accuracy a network loses, and the loss it gains, when one unit is removed from it, without retraining; error "
    "bars are 95 % intervals of the paired differences. It says what this trained network relies on, not what a "
    "network trained without the unit would miss; kinds of units are removed by different rules, which the "
    "results file records."
)
KINDS: Mapping[str, str] = {
    "conv": "tab:blue", "msa": "tab:red", "mlp": "#B87900", "subsample": "#7C7BFF", "stem": "#009E73",
    "head": "#C25FB0", "other": "0.5",
}  # fmt: skip
HATCHES: Mapping[str, str] = {
    "msa": "////",
    "mlp": "....",
    "subsample": "xxxx",
    "stem": "----",
    "head": "++++",
}  # in grey
LABELS: Mapping[str, str] = {"accuracy_drop": "accuracy drop", "loss_increase": "loss increase"}
LONGEST = 22  # characters of a unit's name
HIGH = 100.0  # nats
PARTIAL = ("layers", "pairs", "stages")  # parameters of results that do not hold every unit by itself
LOSS_ONLY = ("loss_increase",)  # the rows of a network whose loss defines no accuracy


def draw(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw one bar per unit, coloured by kind and named below, with every other stage shaded.

    Its height is the accuracy drop, or the loss increase where the loss defines no accuracy.
    """
    return name_units(data, bars(data, ax, change(data), LABELS[change(data)]))


def bars(data: xr.Dataset, ax: Axes, quantity: str, label: str) -> Axes:
    """One bar per unit with its 95 % interval, every other stage shaded."""
    unit, height = data["unit"].values, data[quantity].where(np.isfinite(data[quantity])).values
    colors = [KINDS.get(str(kind), KINDS["other"]) for kind in data["kind"].values]
    hatches = [HATCHES.get(str(kind), "") for kind in data["kind"].values]
    ax.bar(unit, height, color=colors, hatch=hatches, edgecolor=theme.ground(), linewidth=0, width=0.8, zorder=2,
           yerr=broken.bar(half_width(data, quantity)),
           error_kw={"elinewidth": 0.6, "ecolor": "0.25"})  # fmt: skip
    ax.axhline(0.0, color=theme.ink(), linewidth=0.5)
    done = (data["done"] == 1).all([dim for dim in data["done"].dims if dim != "unit"]).values
    lost = np.isnan(data[quantity].values) & done & np.isfinite(height).any()
    broken.mark(ax, unit, np.where(lost, np.inf, data[quantity].values), data[f"{quantity}_se"].values)
    stage = data["stage"].values
    edges = np.r_[0, np.flatnonzero(np.diff(stage)) + 1, len(stage)]
    for turn, (first, end) in enumerate(pairwise(edges)):
        if turn % 2:
            ax.axvspan(unit[first] - 0.5, unit[end - 1] + 0.5, color="0.5", alpha=0.12, linewidth=0, zorder=0)
    if np.nanmax(np.abs(height), initial=0.0) > HIGH:  # one removal that blows up the loss must not hide the others
        ax.set_yscale("symlog", linthresh=1.0)
    units = str(data[quantity].attrs.get("units", "1"))
    ax.set(
        ylabel=label if units in ("1", "loss") else f"{label}\n({escaped(units)})", xlim=(unit[0] - 0.6, unit[-1] + 0.6)
    )
    ax.set_xticks([])
    return ax


def name_units(data: xr.Dataset, ax: Axes) -> Axes:
    """Name the units below their bars."""
    unit = data["unit"].values
    step, size = math.ceil(len(unit) / (25 if theme.narrow() else 60)), style.SMALL
    ax.set_xticks(unit[::step], shortened(data["name"].values)[::step], rotation=90, fontsize=size)
    ax.tick_params(axis="x", length=2, pad=1)
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Accuracy drop, if there is one, over loss increase, per network, with room for the names of its units."""
    from matplotlib.patches import Patch

    rows = [("accuracy_drop", "loss_increase") if change(data) == "accuracy_drop" else LOSS_ONLY for data in results]
    longest = [max(map(len, shortened(data["name"].values))) for data in results]
    ratios = [0.95] * sum(map(len, rows))
    heights = [*ratios, *(0.055 * letters for letters in longest)]
    present = {str(kind) if str(kind) in KINDS else "other" for data in results for kind in data["kind"].values}
    patches = [
        Patch(facecolor=color, hatch=HATCHES.get(kind, ""), edgecolor=theme.ground(), linewidth=0, label=kind)
        for kind, color in KINDS.items()
        if kind in present
    ]
    note = "Shaded: every other stage. Error bars: 95 % intervals over samples."
    figure = style.page(results, looks, height=sum(heights) + 0.2 * len(results), legend=patches, note=note)
    free = iter(figure.subplots(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0])
    drops: list[Axes] = []
    for data, look, row in zip(results, looks, rows, strict=True):
        axes = [bars(data, next(free), quantity, LABELS[quantity]) for quantity in row]
        name_units(data, axes[-1])
        axes[0].set_title(style.fitted(look.label, theme.page_width(), 8, lines=1), loc="left")
        drops += axes[: len(row) - 1]
    limits = [ax.get_ylim() for ax in drops]
    for ax in drops:  # one scale for all networks
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure


def shortened(names: Iterable[str]) -> list[str]:
    """Names without their common dotted prefix, cut if long; of a pair, each part by itself."""
    pairs = [str(name).split(" + ") for name in names]
    parts = [part.split(".") for pair in pairs for part in pair]
    shared = 0
    while len(parts) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    rest = [" + ".join(".".join(part.split(".")[shared:]) for part in pair) for pair in pairs]
    return [escaped(name) for name in cut(rest, [LONGEST * len(pair) for pair in pairs])]

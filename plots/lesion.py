"""What breaks when one unit is removed: accuracy drop per unit (Park & Kim 2022, Fig. 10)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from landscape.plots import style
from landscape.plots.appearance import Look, plain

MEANING = (
    "The accuracy a network loses when one unit is removed from it, without retraining; error bars are the "
    "standard error of the paired differences. It says what this trained network relies on, not what a "
    "network trained without the unit would miss; kinds of units are removed by different rules, which the "
    "results file names."
)
KINDS: Mapping[str, str] = {
    "conv": "tab:blue",
    "msa": "tab:red",
    "mlp": "#E69F00",
    "subsample": "#56B4E9",
    "stem": "#009E73",
    "head": "#CC79A7",
    "other": "0.5",
}


def lesion(data: xr.Dataset, ax: Axes) -> Axes:
    """Draw one bar per unit, coloured by kind and named below; dashed lines part the stages."""
    unit, drop = data["unit"].values, data["accuracy_drop"].values
    colors = [KINDS.get(str(kind), KINDS["other"]) for kind in data["kind"].values]
    ax.bar(unit, drop, color=colors, width=0.8, yerr=data["accuracy_drop_se"].fillna(0.0).values,
           error_kw={"elinewidth": 0.6, "ecolor": "0.25"})  # fmt: skip
    ax.axhline(0.0, color="k", linewidth=0.5)
    for i in np.flatnonzero(np.diff(data["stage"].values)):
        ax.axvline(unit[i] + 0.5, color="0.4", linestyle="--", linewidth=0.6)
    step = math.ceil(len(unit) / 80)
    size = 6 if len(unit) <= 40 else 5
    ax.set_xticks(unit[::step], shortened(data["name"].values)[::step], rotation=90, fontsize=size)
    ax.tick_params(axis="x", length=2, pad=1)
    ax.set(ylabel="accuracy drop", xlim=(unit[0] - 0.6, unit[-1] + 0.6))
    return ax


def page(answers: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per network, with room for the names of its units."""
    longest = max(len(name) for data in answers for name in shortened(data["name"].values))
    row = 1.25 + 0.055 * longest
    present = {str(kind) if str(kind) in KINDS else "other" for data in answers for kind in data["kind"].values}
    patches = [Patch(color=color, label=kind) for kind, color in KINDS.items() if kind in present]
    figure = style.page(answers, looks, height=row * len(answers), legend=patches, note="Dashed: stages.")
    axes = figure.subplots(len(answers), 1, sharey=True, squeeze=False)[:, 0]
    for data, ax, look in zip(answers, axes, looks, strict=True):
        lesion(data, ax)
        ax.set_title(style.fitted(look.label, style.PAGE, 8, lines=1), loc="left")
    return figure


def shortened(found: Iterable[str]) -> list[str]:
    """Names without the dotted part that all share, their beginning cut where they are long."""
    parts = [str(name).split(".") for name in found]
    shared = 0
    while len(parts) > 1 and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    rest = [".".join(part[shared:]) for part in parts]
    return [plain(name if len(name) <= 22 else f"…{name[-21:]}") for name in rest]

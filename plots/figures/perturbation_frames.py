"""Draw the accuracy and the consistency along sequences, one panel per perturbation, all networks in each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import appearance, style
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Along the sequences, frame by frame: solid the share of images whose prediction is the same at the next frame, "
    "dotted the accuracy. A network can be consistent where its accuracy is low, and frames of noise are independent "
    "of each other, so that their order has no meaning."
)
MARKS = 6  # markers on a line
NOTE = "Solid: the same prediction as at the next frame. Dotted: accuracy."


def draw(data: xr.Dataset, ax: Axes, *, look: Look, which: int = 0) -> Axes:
    """Draw consistency and accuracy of one perturbation over its frames."""
    frame = data["frame"].values
    same, right = (data[f"{name}_at"].values[which] for name in ("consistency", "accuracy"))
    shown = np.isfinite(same)
    cue: dict[str, Any] = {
        "color": look.color, "marker": look.marker, "markersize": 3, "markevery": max(1, len(frame) // MARKS),
    }  # fmt: skip
    ax.plot(frame[shown] + 0.5, same[shown], label=look.label, **cue)
    shown = np.isfinite(right)
    ax.plot(frame[shown], right[shown], linestyle=":", **cue)
    style.whole_numbers(ax)
    ax.set(xlabel="frame", ylim=(0, 1.02), ylabel="share of images")
    ax.set_title(appearance.escaped(str(data["perturbation_name"].values[which]).replace("_", " ")))
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per perturbation."""
    names = list(dict.fromkeys(str(name) for data in results for name in data["perturbation_name"].values))
    columns = min(len(names), 3 if len(names) in (3, 5, 6) else 4)
    shown: dict[str, Any] = {"legend": [replace(look, line="-") for look in looks], "note": NOTE}
    figure, axes = style.beside(results, looks, len(names), height=1.65, columns=columns, sharey=True, **shown)
    for ax, name in zip(axes, names, strict=True):
        for data, look in zip(results, looks, strict=True):
            there = [str(one) for one in data["perturbation_name"].values]
            if name in there:
                draw(data, ax, look=look, which=there.index(name))
    style.label_outer(axes)
    return figure

"""Draw calibration and uncertainty of ensembles over the number of members (Park & Kim 2021, arXiv 2105.12639)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import broken, style
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics.paired import Difference, mcnemar, paired_t
from landscape.statistics.rounding import plus_minus
from landscape.statistics.stored import error_of, half_width

MEANING = (
    "What averaging the probabilities of more members does: every member costs a forward pass, and the epistemic part "
    "of the entropy is what the members disagree about. The members are those that were given, so that the curves "
    "say nothing about members that are trained in another way."
)
PANELS = {
    "nll": "NLL (nats)", "accuracy": "error", "ece": "ECE", "brier": "Brier score", "ece_signed": "signed ECE",
    "entropy": "entropy (nats)",
}  # fmt: skip
SECONDS = "seconds_per_image"
TIMED = (
    "Prediction time on this machine: one image at a time, with 95 % intervals; that of dropout members includes their "
    "frozen masks."
)
PARTS = {"predictive": "-", "aleatoric": "--", "epistemic": ":"}
NOTE = (
    "A member costs one forward pass. Bars: 95 % intervals over samples. Bands: one standard deviation over orders of "
    "the members; dots at size 1: each member by itself. Entropy, in the given order: predictive solid, aleatoric "
    "dashed, epistemic dotted."
)


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look) -> tuple[Axes, ...]:
    """Draw NLL, error, ECE, Brier score, signed ECE and the three entropies over the number of members."""
    size = data["size"].values
    for ax, (name, label) in zip(axes, PANELS.items(), strict=False):
        if name == "entropy":
            for part, line in PARTS.items():
                entropy, error = data[f"{part}_entropy"].values, error_of(data, f"{part}_entropy")
                broken.mark(ax, size, entropy, error)
                ax.errorbar(
                    size, entropy, yerr=broken.bar(half_width(data, f"{part}_entropy")), color=look.color,
                    marker=look.marker, linestyle=line, elinewidth=0.7,
                )  # fmt: skip
        else:
            _curve(data, ax, name, look)
        ax.set(xlabel="members", ylabel=label)
        count_axis(ax, size)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """Six panels, all ensembles in each, and one for the prediction time where it is measured."""
    timed = [i for i, data in enumerate(results) if f"{SECONDS}_all" in data.attrs]
    note = f"{NOTE} {TIMED}" if timed else NOTE
    count = len(PANELS) + bool(timed)
    most = 4 if timed else 3
    figure, axes = style.beside(results, looks, count, height=1.85, most=most, legend=looks, note=note)
    for data, look in zip(results, looks, strict=True):
        draw(data, tuple(axes), look=look)
    sizes = np.unique(np.concatenate([data["size"].values for data in results]))
    for i in timed:
        draw_time(results[i], axes[len(PANELS)], looks[i])
    for ax in axes:
        count_axis(ax, sizes)
    axes[4].axhline(0.0, color="0.5", linewidth=0.6, zorder=0)
    for ax in axes[5:]:
        ax.set_ylim(bottom=0.0)
    style.label_outer(axes, same=False)
    return figure


def draw_time(data: xr.Dataset, ax: Axes, look: Look) -> Axes:
    """Draw the seconds that the prediction of an image takes, by one pass and by all members."""
    value, low, high = (
        np.array([float(data.attrs[f"{SECONDS}_{way}{end}"]) for way in ("one_pass", "all")])
        for end in ("", "_low", "_high")
    )
    ax.errorbar([1, data["size"].values[-1]], value, yerr=broken.bars(value, low, high), **look.cues, elinewidth=0.7)
    ax.set(xlabel="members", ylabel="prediction time (s per image)")
    return ax


def notes(data: xr.Dataset) -> dict[str, str]:
    """How many members there are; the scores of one and of all, and the time of their predictions."""
    if not np.isfinite(data["nll"].values).any():
        return {}
    found = {"members": str(int(data["size"].values[-1]))}
    for name in (name for name in ("nll", "accuracy", "ece", "temperature") if name in data):
        halves = np.broadcast_to(half_width(data, name), data[name].shape)
        found[name] = " to ".join(plus_minus(float(data[name].values[at]), float(halves[at])) for at in (0, -1))
    if f"{SECONDS}_all" in data.attrs:
        one, every = (float(data.attrs[f"{SECONDS}_{way}"]) for way in ("one_pass", "all"))
        found["seconds per image"] = f"{one:.4g} to {every:.4g}"
    return found


def _curve(data: xr.Dataset, ax: Axes, name: str, look: Look) -> None:
    """A metric with its interval over samples, its band over orders, and every member's own value."""
    values, low, high, spread = (data[f"{name}{end}"].values for end in ("", "_low", "_high", "_spread"))
    own, size = data[f"member_{name}"].values, data["size"].values
    if name == "accuracy":
        values, low, high, own = 1 - values, 1 - high, 1 - low, 1 - own
    broken.mark(ax, size, values, np.stack([low, high]))
    ax.errorbar(size, values, yerr=broken.bars(values, low, high), **look.cues, elinewidth=0.7)
    half = broken.bar(spread)
    ax.fill_between(size, values - half, values + half, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(np.ones(len(own)), own, ".", color=look.color, alpha=0.4, markersize=3)


def count_axis(ax: Axes, sizes: Any) -> None:
    """Make the x axis that of numbers of members."""
    ax.set_xscale("log")
    ax.set_xticks(sizes, [str(int(size)) for size in sizes])
    ax.xaxis.minorticks_off()
    ax.set_xlim(0.85, 1.15 * max(sizes))


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Of the means over all members."""
    if data["done"].shape != other["done"].shape:
        return {}
    nll, right = ([one[f"sample_{name}"].isel(size=-1).values for one in (data, other)] for name in ("nll", "correct"))
    there = np.isfinite(right[0]) & np.isfinite(right[1])
    return {
        "nll of all members": paired_t(*(part[there] for part in nll)),
        "accuracy of all members": mcnemar(*(part[there] for part in right)),
    }

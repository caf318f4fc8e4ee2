"""Draw NEP, APE and the largest eigenvalue over the phases of training (Park & Kim, arXiv 2202.06709, Sec. 2)."""

import json
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import looks as looks_of
from landscape.plots.figure import Axes, Figure, Look
from landscape.results import protocols, reader

MEANING = (
    "NEP (share of negative eigenvalues) and APE (mean of the positive ones) with their 95 % bootstrap intervals over "
    "mini-batches, and the median largest eigenvalue with its quartiles over mini-batches, at snapshots of one run. "
    "Nothing was measured between the snapshots."
)
NOTE = "Bands: 95 % intervals over mini-batches. Bands of the largest eigenvalue: its quartiles over mini-batches."


def draw(data: Sequence[xr.Dataset] | xr.Dataset, axes: Sequence[Axes], *, look: Look) -> Sequence[Axes]:
    """Draw the three numbers of one run over its epochs on three axes.

    The data are results of equal parameters at snapshots of the run; a single result is a run of one.
    """
    run = sorted([data] if isinstance(data, xr.Dataset) else data, key=epoch)
    at = [epoch(result) for result in run]
    for ax, name in zip(axes, ("nep", "ape"), strict=False):
        middle, low, high = (np.array([float(a[key]) for a in run]) for key in (name, f"{name}_low", f"{name}_high"))
        _band(ax, at, middle, np.where(np.isfinite(low), low, middle), np.where(np.isfinite(high), high, middle), look)
    middle, low, high = np.array([np.nanquantile(result["largest"].values, [0.5, 0.25, 0.75]) for result in run]).T
    _band(axes[2], at, middle, low, high, look)
    for ax, name in zip(axes, ("NEP", "APE", "largest eigenvalue"), strict=True):
        ax.set(xlabel="epoch", ylabel=name)
        style.whole_numbers(ax)
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One line per run, in the look of its last snapshot."""
    lines = list(runs(results).values())
    last = [results[line[-1]] for line in lines]
    shown = looks_of(last)  # one look per run, not one per snapshot
    figure, axes = style.beside(last, shown, 3, height=1.9, legend=shown, note=NOTE)
    for line, look in zip(lines, shown, strict=True):
        draw([results[i] for i in line], axes, look=look)
    axes[0].set_ylim(bottom=-0.03 * axes[0].get_ylim()[1])
    for ax in axes[1:]:
        shown_values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in ax.lines])
        if 0 < shown_values.min() < 0.1 * shown_values.max():
            ax.set_yscale("log")
    return figure


def select(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of the results that belong to a run with several of its snapshots."""
    return sorted(i for line in runs(results).values() for i in line)


def runs(results: Sequence[xr.Dataset]) -> dict[tuple[str, str, str], list[int]]:
    """Positions of results of equal parameters at several snapshots of one run, by epoch."""
    found: dict[tuple[str, str, str], dict[float, int]] = {}
    for i, data in enumerate(results):
        folder = str(PurePath(str(protocols.stored(data, "spec").get("checkpoint") or "")).parent)
        if np.isfinite(epoch(data)) and folder not in ("", "."):
            key = (folder, str(data.attrs.get("protocol", "")), json.dumps(reader.parameters_of(data), sort_keys=True))
            found.setdefault(key, {})[epoch(data)] = i  # the newer of two at one epoch
    return {key: [i for _, i in sorted(line.items())] for key, line in found.items() if len(line) > 1}


def epoch(data: xr.Dataset) -> float:
    """The epoch of a result's checkpoint, NaN where the file does not have it."""
    return float(data.attrs.get("epoch", np.nan))


def _band(ax: Axes, at: Sequence[float], middle: np.ndarray, low: np.ndarray, high: np.ndarray, look: Look) -> None:
    ax.plot(at, middle, **look.cues)
    ax.fill_between(at, low, high, color=look.color, alpha=0.2, linewidth=0)

"""Draw the accuracy drop under noise in one frequency band, all networks in one panel (Park & Kim 2022, Fig. 2b)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import appearance, broken, headlines, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.results.reader import parameters_of
from landscape.statistics.stored import half_width

MEANING = (
    "The accuracy a network loses when noise of one band of frequencies is added to its inputs: where a curve is high, "
    "the network relies on signal of those frequencies. With equal amplitude per pixel, a band at higher "
    "frequencies holds more of them and so more noise (equal energy removes this), and robustness to random noise is "
    "not robustness to adversarial perturbations."
)


def draw(data: xr.Dataset, ax: Axes, *, look: Look) -> Axes:
    """Draw the accuracy drop over the frequency of the noise, with its 95 % interval; empty bands are left out.

    Where the loss defines no accuracy, draw the loss increase.
    """
    quantity = headlines.change(data)
    shown = np.isfinite(data[quantity].values)
    band, drop = data["band"].values[shown], data[quantity].values[shown]
    half = broken.bar(half_width(data, quantity)[shown])
    ax.fill_between(band, drop - half, drop + half, color=look.color, alpha=0.18, linewidth=0)
    ax.plot(band, drop, **look.cues, label=look.label)
    ax.axhline(0.0, color=theme.ink(), linewidth=0.5)
    ax.set(xlabel="frequency of the noise", ylabel=quantity.replace("_", " "), xlim=(0, 1))
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", r"0.25$\pi$", r"0.5$\pi$", r"0.75$\pi$", r"$\pi$"])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per kind of noise and quantity, all networks in each."""
    kinds = list(dict.fromkeys(map(kind, results)))
    panels = [[i for i, data in enumerate(results) if kind(data) == one] for one in kinds]
    drawn = {i: seen for panel in panels for i, seen in zip(panel, _looks_within(results, looks, panel), strict=True)}
    legend = {(seen.label, seen.line): seen for _, seen in sorted(drawn.items())}
    same = len(set(map(headlines.change, results))) == 1
    figure, axes = style.beside(
        results, looks, len(panels), height=2.6, columns=min(2, len(panels)), sharey=same,
        legend=list(legend.values()), note="Bands: 95 % intervals over samples.",
    )  # fmt: skip
    for ax, one, panel in zip(axes, kinds, panels, strict=True):
        for i in panel:
            draw(results[i], ax, look=drawn[i])
        ax.set_title(one)
    style.label_outer(axes, same=same)
    return figure


def kind(data: xr.Dataset) -> str:
    """The kind of noise in words: its amplitude, and what is equal over the bands."""
    parameters = parameters_of(data)
    size = f"eps {float(parameters['eps']):g}" if "eps" in parameters else "eps not stored"
    equal = "equal energy in every band" if parameters.get("equal_energy") else "equal amplitude per pixel"
    linear = ", linear classifier" if parameters.get("classifier") == "linear" else ""
    return f"{size}, {equal}{linear}{' (loss)' if headlines.change(data) == 'loss_increase' else ''}"


def _looks_within(results: Sequence[xr.Dataset], looks: Sequence[Look], panel: Sequence[int]) -> list[Look]:
    """The looks of the results in one panel, with labels and lines that distinguish these only."""
    among = appearance.looks([results[i] for i in panel])
    return [replace(looks[i], label=seen.label, line=seen.line) for i, seen in zip(panel, among, strict=True)]


def notes(data: xr.Dataset) -> dict[str, str]:
    """Bands without a frequency."""
    empty = str(data.attrs.get("empty_bands", ""))
    return {"bands without a frequency": empty} if empty else {}

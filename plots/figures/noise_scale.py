"""Draw gradient noise scales with intervals, and what they say about batch sizes (McCandlish et al. 2018, eq. 2.11)."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style, theme
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "The gradient noise scale is the batch size at which the noise of a mini-batch's gradient equals the gradient: "
    "smaller batches cost more steps, larger ones more samples; an arrow is a lower bound, where the gradient is not "
    "told apart from 0. It is that of one step of plain SGD at these weights with the best learning rate, grows during "
    "training, and says nothing about Adam, momentum or generalisation."
)
NOTE = (
    "Filled: simple, tr(S) / |G|^2; open: weighted by the curvature, tr(H S) / (G' H G); bars: 95 % intervals "
    "(Fieller); an arrow: a lower bound."
)
TRADE_OFF = (
    "Right: steps (falling) and samples (rising) to the same loss, over the fewest possible; bands: the interval of "
    "the simple noise scale. Both are 2 at the critical batch size; a lower bound has no curves."
)
KINDS = {"simple": (0.0, True), "curvature": (0.22, False)}  # distance below the row, and whether the marker is filled
MOST = 30.0  # of the axis of steps and samples


def draw(data: xr.Dataset, axes: tuple[Axes, ...], *, look: Look, row: float = 0.0) -> tuple[Axes, ...]:
    """Draw both noise scales in a row (first axes), and the trade-off between steps and samples (second, if any)."""
    for kind, (below, filled) in KINDS.items():
        if kind in data:
            _point(data, kind, axes[0], row + below, look, filled)
    axes[0].set(xscale="log", xlabel="gradient noise scale (samples)")
    for ax in axes[1:]:
        _trade_off(data, ax, look)
        ax.set(xscale="log", yscale="log", ylim=(0.9, MOST), xlabel="batch size", ylabel="relative to the fewest")
        ax.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        ax.minorticks_off()
    return axes


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One row per checkpoint beside the trade-off of all of them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    resolved = any(float(data["simple"]) > 0 for data in results)
    note = f"{NOTE} {TRADE_OFF}" if resolved else f"{NOTE} No simple noise scale is resolved."
    height = max(2.0, 0.6 + 0.3 * len(results)) if resolved else 0.6 + 0.3 * max(len(results), 2)
    figure = style.page(results, looks, height=height, legend=looks, note=note)
    axes = tuple(figure.subplots(1, 1 + resolved, squeeze=False)[0])
    left = axes[0]
    for right in axes[1:]:
        right.axhline(2.0, color=theme.muted(), linewidth=0.6, linestyle=":")
    for i, (data, look) in enumerate(zip(results, looks, strict=True)):
        draw(data, axes, look=look, row=float(i))
    left.set(yticks=[], ylim=(len(results) - 0.5 + KINDS["curvature"][0], -0.5))
    low, high = _range(results)
    left.set_xlim(low / 1.5, high * 1.5)
    for ax in axes:
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    for right in axes[1:]:
        right.set_xlim(low / 5, high * 5)
    return figure


def notes(data: xr.Dataset) -> dict[str, str]:
    """Lower bounds, where the denominator is not told apart from 0."""
    found = {}
    for kind, below in (("simple", "|G|^2"), ("curvature", "G'HG")):
        if kind in data and float(data[f"{kind}_resolved"]) != 1.0 and np.isfinite(data[f"{kind}_low"]):
            found[kind] = f"above {float(data[f'{kind}_low']):.3g} ({below} is not told apart from 0; more samples may)"
    return found


def _point(data: xr.Dataset, kind: str, ax: Axes, at: float, look: Look, filled: bool) -> None:
    value, low, high = (float(data[name]) for name in (kind, f"{kind}_low", f"{kind}_high"))
    face = look.color if filled else theme.ground()
    if np.isfinite(value):
        low = max(low, 1e-3 * value)  # a logarithmic axis has no 0
        ax.plot([low, high], [at, at], color=look.color, linewidth=1.0)
        ax.plot(value, at, look.marker, color=look.color, markerfacecolor=face, label=look.label if filled else None)
    elif low > 0:
        ax.plot(low, at, ">", color=look.color, markerfacecolor=face, label=look.label if filled else None)
        ax.annotate(
            "", (1.0, at), (low, at), xycoords=("axes fraction", "data"), textcoords="data",
            arrowprops={"arrowstyle": "->", "color": look.color, "linewidth": 0.8, "shrinkB": 2},
        )  # fmt: skip


def _trade_off(data: xr.Dataset, ax: Axes, look: Look) -> None:
    """Steps 1 + B_noise / B and samples 1 + B / B_noise, whose product of excesses is 1 (eq. 2.11)."""
    value, low, high = (float(data[name]) for name in ("simple", "simple_low", "simple_high"))
    if not value > 0:
        return
    sizes = value * np.geomspace(1 / (2 * MOST), 2 * MOST, 200)
    low = max(low, 1e-3 * value)
    ax.plot(sizes, 1 + value / sizes, color=look.color, linestyle=look.line)
    ax.plot(sizes, 1 + sizes / value, color=look.color, linestyle=look.line)
    ax.fill_between(sizes, 1 + low / sizes, 1 + high / sizes, color=look.color, alpha=0.15, linewidth=0)
    ax.fill_between(sizes, 1 + sizes / high, 1 + sizes / low, color=look.color, alpha=0.15, linewidth=0)


def _range(results: Sequence[xr.Dataset]) -> tuple[float, float]:
    """Smallest and largest positive number that is drawn."""
    names = [f"{kind}{end}" for kind in KINDS for end in ("", "_low", "_high")]
    values = np.array([float(data[name]) for data in results for name in names if name in data])
    drawn = values[np.isfinite(values) & (values > 0)]
    return (float(drawn.min()), float(drawn.max())) if drawn.size else (1.0, 10.0)

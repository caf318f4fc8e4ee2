"""Draw the scores of temporally smoothed predictions against the decay of the weights, with their paired changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import LINES, Look, escaped
from landscape.plots.appearance import look as look_of
from landscape.plots.figure import Axes, Figure
from landscape.plots.headlines import Numbers

MEANING = (
    "Scores of predictions that are averaged over neighbouring frames, against how far the average reaches: where the "
    "loss of one pass per frame falls to that of several, averaging over time replaces an ensemble. It gains only if "
    "the scene changes slowly against tau, and consistency alone rewards a prediction that never changes."
)
PANELS = {
    "nll": "negative log likelihood (nats)",
    "accuracy": "accuracy",
    "mean_iou": "mean IoU",
    "ece": "expected calibration error",
    "consistency": "consistency",
    "boundary_accuracy": "accuracy near boundaries",
}


def draw(data: xr.Dataset, ax: Axes, *, look: Look | None = None, score: str = "nll") -> Axes:
    """Draw one score over tau, a line per kind of prediction; the thin level lines are without smoothing."""
    look = look or look_of(data)
    taus = data["tau"].values[1:]
    for i, line in zip(range(data.sizes["prediction"]), LINES, strict=False):
        one = data.isel(prediction=i)
        value, plain = one[score].values[1:], float(one[score].values[0])
        low, high = (plain + one[f"{score}_change_{end}"].values[1:] for end in ("low", "high"))
        ax.fill_between(taus, low, high, color=look.color, alpha=0.13, linewidth=0)
        ax.plot(taus, value, color=look.color, linestyle=line, marker=look.marker)
        ax.axhline(plain, color=look.color, linestyle=line, linewidth=0.6, alpha=0.7)
    ax.set_xscale("log", base=2)
    ax.set_xticks(taus, [f"{tau:g}" for tau in taus])
    ax.minorticks_off()
    ax.set(xlabel="tau (frames)", ylabel=PANELS[score])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, all networks in each."""
    from matplotlib.lines import Line2D

    shown = [name for name in PANELS if any(name in data for data in results)]
    legend = [look.legend_handle() for look in looks]
    for handle in legend:
        handle.set_linestyle("none")  # colours and markers are of networks, line styles of predictions
    kinds = kinds_of(results)
    legend += [
        Line2D([], [], color="0.3", linestyle=line, label=kind) for kind, line in zip(kinds, LINES, strict=False)
    ]
    styles = "; ".join(f"{style.LINE_WORDS[line]}: {kind}" for kind, line in zip(kinds, LINES, strict=False))
    note = (
        f"Line styles are predictions ({escaped(styles)}); thin lines are without smoothing over time. Bands: 95 % "
        f"intervals of the paired change by smoothing, from resampled blocks of frames. {window(results[0])}"
    )
    columns = 2 if len(shown) in (2, 4) else 3
    rows = -(-len(shown) // columns)
    figure = style.page(results, looks, height=2.1 * rows, legend=legend, note=note)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[len(shown) :]:
        ax.remove()
    for ax, score in zip(axes, shown, strict=False):
        for data, look in zip(results, looks, strict=True):
            if score in data:
                draw(data, ax, look=look, score=score)
    return figure


def kinds_of(results: Sequence[xr.Dataset]) -> list[str]:
    """What each line style is, by the position of the prediction: the number of passes may differ between networks."""
    most = max(data.sizes["prediction"] for data in results)
    found = []
    for i in range(most):
        names = dict.fromkeys(str(name) for data in results for name in data["name"].values[i : i + 1])
        found.append(" or ".join("one deterministic pass" if name == "deterministic" else name for name in names))
    return found


def window(data: xr.Dataset) -> str:
    """The frames that are averaged, in words."""
    from landscape.plots.appearance import parameters_of

    given = parameters_of(data)
    past, ahead = int(given.get("past", 0)), int(given.get("look_ahead", 0))
    return f"Averages over the frame, {past} before and {ahead} after it."


def best(data: xr.Dataset) -> int:
    """Position on the tau axis of the lowest negative log likelihood of the smoothed deterministic prediction."""
    values = data["nll"].isel(prediction=0).values[1:]
    return 1 + int(np.nanargmin(values)) if np.isfinite(values).any() else 0


def headline(data: xr.Dataset) -> Numbers:
    """NLL and calibration error without smoothing and at the best tau, and the throughput relative to one pass."""
    i = best(data)
    one = data.isel(prediction=0)
    found: Numbers = {
        "nll": float(one["nll"][0]),
        "smoothed": float(one["nll"][i]),
        "at tau": float(data["tau"][i]),
        "ece": float(one["ece"][0]),
        "smoothed ece": float(one["ece"][i]),
    }
    one_pass = float(data.attrs.get("frames_per_second_deterministic", np.nan))
    for way in ("smoothed", "mc_dropout"):
        rate = float(data.attrs.get(f"frames_per_second_{way}", np.nan))
        found[f"throughput {way.replace('_', ' ')}"] = rate / one_pass
    return found

"""Draw the scores of temporally smoothed predictions against the decay of the weights, with their paired changes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, style, theme
from landscape.plots.appearance import LINES, escaped, look_of
from landscape.plots.figure import Axes, Figure, Look

MEANING = (
    "Scores of predictions that are averaged over neighbouring frames, against how far the average reaches: where the "
    "loss of one pass per frame falls to that of several, averaging over time replaces an ensemble. It gains only if "
    "the scene changes slowly against tau, and consistency alone rewards a prediction that never changes."
)
PANELS = {
    "nll": "negative log likelihood (nats)", "accuracy": "accuracy", "mean_iou": "mean IoU",
    "ece": "expected calibration error", "consistency": "consistency", "boundary_accuracy": "accuracy near boundaries",
}  # fmt: skip
WAYS = ("deterministic", "smoothed", "mc_dropout")  # of predictions whose time is stored


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
    shown = [name for name in PANELS if any(name in data for data in results)]
    kinds = kinds_of(results)
    # colours and markers are of networks, line styles of predictions
    legend = [replace(look, line=" ") for look in looks]
    legend += [Look(kind, theme.muted(), "", line) for kind, line in zip(kinds, LINES, strict=False)]
    styles = "; ".join(f"{style.LINE_WORDS[line]}: {kind}" for kind, line in zip(kinds, LINES, strict=False))
    note = (
        f"Line styles are predictions ({escaped(styles)}); thin lines are without smoothing over time. Bands: 95 % "
        f"intervals of the paired change by smoothing, from resampled blocks of frames. {window(results[0])}"
    )
    timed = any(f"seconds_per_frame_{WAYS[0]}" in data.attrs for data in results)
    if timed:
        note += " Prediction time: means over single frames, with 95 % intervals; MC dropout includes its frozen masks."
    count = len(shown) + timed
    columns = {2: 2, 4: 2, 7: 4}.get(count, 3)
    figure, axes = style.beside(results, looks, count, height=2.1, columns=columns, legend=legend, note=note)
    for ax, score in zip(axes, shown, strict=False):
        for data, look in zip(results, looks, strict=True):
            if score in data:
                draw(data, ax, look=look, score=score)
    if timed:
        draw_time(results, axes[len(shown)], looks)
    return figure


def draw_time(results: Sequence[xr.Dataset], ax: Axes, looks: Sequence[Look]) -> Axes:
    """Draw the seconds that a prediction takes: of one pass, with smoothing over time, and of all dropout masks."""
    members = dict.fromkeys(str(data.attrs.get("members", 0)) for data in results if int(data.attrs.get("members", 0)))
    names = {WAYS[0]: "one pass", WAYS[1]: "one pass,\nsmoothed"}
    if members:
        names[WAYS[2]] = f"MC dropout,\n{' or '.join(members)} passes"
    everything = []
    for turn, (data, look) in enumerate(zip(results, looks, strict=True)):
        shift = 0.3 * (turn - (len(results) - 1) / 2) / max(len(results), 2)
        value, low, high = (
            np.array([float(data.attrs.get(f"seconds_per_frame_{way}{end}", np.nan)) for way in names])
            for end in ("", "_low", "_high")
        )
        ax.errorbar(
            np.arange(len(names)) + shift, value, yerr=broken.bars(value, low, high),
            color=look.color, marker=look.marker, linestyle="none", elinewidth=0.8,
        )  # fmt: skip
        everything.append(value)
    ax.set_xticks(range(len(names)), list(names.values()), fontsize=style.SMALL)
    ax.set(ylabel="prediction time (s per frame)", xlim=(-0.5, len(names) - 0.5))
    style.log_if_wide(ax, np.concatenate(everything))
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=0.0)
    return ax


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
    from landscape.results.reader import parameters_of

    given = parameters_of(data)
    past, ahead = int(given.get("past", 0)), int(given.get("look_ahead", 0))
    return f"Averages over the frame, {past} before and {ahead} after it."


def notes(data: xr.Dataset) -> dict[str, str]:
    """The prediction time."""
    seconds = float(data.attrs.get("seconds_per_frame_deterministic", np.nan))
    return {"seconds per frame": f"{seconds:.4g}"} if np.isfinite(seconds) else {}

"""Draw the scores of temporally smoothed predictions against the decay of the weights, with their paired changes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from landscape.plots import broken, style, theme
from landscape.plots.appearance import escaped
from landscape.plots.figure import Axes, Figure, Look, Named

MEANING = (
    "Scores of predictions that are averaged over neighbouring frames, against how far the average reaches: where the "
    "loss of one pass per frame falls to that of several, averaging over time replaces an ensemble. It gains only if "
    "the scene changes slowly against tau, and consistency alone rewards a prediction that never changes."
)
PANELS = {
    "nll": "negative log likelihood (nats)", "accuracy": "accuracy", "mean_iou": "mean IoU",
    "ece": "expected calibration error", "consistency": "consistency", "boundary_accuracy": "accuracy near boundaries",
}  # fmt: skip
WORDS = {  # of methods, with their passes per frame
    "deterministic": "one pass", "temporal": "one pass, smoothed",
    "mc_dropout": "MC dropout, {} passes", "mc_dropout_temporal": "one dropout mask, smoothed",
    "ensemble": "{} networks", "ensemble_temporal": "one of the networks, smoothed",
}  # fmt: skip
LINES: dict[str, tuple[str, Named]] = {  # method -> the one that smooths one pass per frame, and the style of both
    "deterministic": ("temporal", "-"), "mc_dropout": ("mc_dropout_temporal", "--"),
    "ensemble": ("ensemble_temporal", "-."),
}  # fmt: skip


def draw(data: xr.Dataset, ax: Axes, *, look: Look, score: str = "nll") -> Axes:
    """Draw one score over tau, a line per smoothed method; the thin level lines are without smoothing."""
    names, taus = data["method_name"].values, data["tau"].values
    for name, (smoothed, line) in LINES.items():
        at = names == smoothed
        for plain in data[score].values[names == name]:  # one, or none
            low, high = (plain + data[f"{score}_change_{end}"].values[at] for end in ("low", "high"))
            ax.fill_between(taus[at], low, high, color=look.color, alpha=0.13, linewidth=0)
            ax.plot(taus[at], data[score].values[at], color=look.color, linestyle=line, marker=look.marker)
            ax.axhline(plain, color=look.color, linestyle=line, linewidth=0.6, alpha=0.7)
    ax.set_xscale("log", base=2)
    ax.set_xticks(taus[names == "temporal"], [f"{tau:g}" for tau in taus[names == "temporal"]])
    ax.minorticks_off()
    ax.set(xlabel="tau (frames)", ylabel=PANELS[score])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, all networks in each."""
    shown = [name for name in PANELS if any(name in data for data in results)]
    # colours and markers are of networks, line styles of methods
    legend = [replace(look, line=" ") for look in looks]
    known = words_of(results)
    styles = {line: f"{known[to]}; thin: {known[name]}" for name, (to, line) in LINES.items() if {name, to} <= {*known}}
    legend += [Look(words, theme.muted(), "", line) for line, words in styles.items()]
    lines = ". ".join(f"{style.LINE_WORDS[line].capitalize()}: {words}" for line, words in styles.items())
    note = (
        f"{lines}. Bands: 95 % intervals of the paired difference from the thin line, from resampled blocks of frames. "
        f"{window(results[0])}"
    )
    timed = any(np.isfinite(data["seconds_per_frame"]).any() for data in results)
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
    """Draw the seconds that a prediction takes, by method."""
    names = words_of(results)
    everything = []
    for turn, (data, look) in enumerate(zip(results, looks, strict=True)):
        shift = 0.3 * (turn - (len(results) - 1) / 2) / max(len(results), 2)
        _, first = np.unique(data["method_name"].values.astype(str), return_index=True)  # the time is that of every tau
        one = data.isel(method=np.sort(first))
        y = [[*names].index(name) + shift for name in one["method_name"].values]
        value, low, high = (one[f"seconds_per_frame{end}"].values for end in ("", "_low", "_high"))
        ax.errorbar(
            value, y, xerr=broken.bars(value, low, high),
            color=look.color, marker=look.marker, linestyle="none", elinewidth=0.8,
        )  # fmt: skip
        everything.append(value)
    ax.set_yticks(range(len(names)), [one.replace(", ", ",\n") for one in names.values()], fontsize=style.SMALL)
    ax.set(xlabel="prediction time (s per frame)", ylim=(len(names) - 0.5, -0.5))
    if style.is_wide(np.concatenate(everything)):
        ax.set_xscale("log")
    else:
        ax.set_xlim(left=0.0)
    return ax


def words_of(results: Sequence[xr.Dataset]) -> dict[str, str]:
    """All methods in words, with their passes per frame, whose number may differ between networks."""
    passes: dict[str, dict[str, None]] = {}
    for data in results:
        for name, count in zip(data["method_name"].values, data["passes"].values, strict=True):
            passes.setdefault(name, {})[str(count)] = None
    return {name: escaped(WORDS.get(name, name)).replace("{}", " or ".join(some)) for name, some in passes.items()}


def window(data: xr.Dataset) -> str:
    """The frames that are averaged, in words."""
    from landscape.results.reader import parameters_of

    given = parameters_of(data)
    past, ahead = int(given.get("past", 0)), int(given.get("look_ahead", 0))
    return f"Averages over the frame, {past} before and {ahead} after it."


def notes(data: xr.Dataset) -> dict[str, str]:
    """The prediction time."""
    seconds = float(data["seconds_per_frame"].values[0])
    return {"seconds per frame": f"{seconds:.4g}"} if np.isfinite(seconds) else {}

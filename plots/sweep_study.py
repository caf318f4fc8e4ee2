"""Draw accuracy, training NLL, error against it, and Hessian eigenvalues over one argument of trained networks.

Kernel sizes, patch sizes and numbers of heads, as Figures 7a, C.2, C.5 and C.6 of Park & Kim 2022 (arXiv 2202.06709).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import style
from landscape.plots.appearance import FAMILIES, OTHERS, escaped, family
from landscape.plots.figure import Axes, Figure
from landscape.plots.smoothing_study import members_of
from landscape.statistics.stored import ends_of

MEANING = (
    "Networks that differ in one argument alone: accuracy on test data, the error there against the NLL on training "
    "data, and the curvature. A network that is left of and above another one fits the training data better without "
    "generalising better; each point is one training run, whose seed may matter more than the argument."
)
FEWEST = 3  # values that make a sweep
REST = ("seed", "name")  # what may differ too: the seed, and the name of the recipe
Number = tuple[float, float, float]  # value, and the ends of its 95 % interval
UNKNOWN: Number = (np.nan, np.nan, np.nan)
Row = dict[str, Any]


@dataclass
class Run:
    """The results of one trained network: calibration on the test and on the train split, hessian."""

    configuration: dict[str, Any]
    epoch: float = 0.0
    results: dict[str, xr.Dataset] = field(default_factory=dict)  # by "test", "train" and "hessian"


@dataclass
class Study:
    """Runs that differ in one argument, in the order of its values."""

    argument: str
    runs: list[Run]

    @property
    def label(self) -> str:
        """The network and the argument."""
        return f"{self.runs[0].configuration['model']}-{self.argument}"

    @property
    def values(self) -> list[str]:
        """The different values in words."""
        return list(dict.fromkeys(self.value(run) for run in self.runs))

    def value(self, run: Run) -> str:
        """The value of a run in words."""
        return in_words(run.configuration.get(self.argument))


def studies(stored: Iterable[tuple[str, xr.Dataset]]) -> list[Study]:
    """A study of every argument of which networks have three values or more, and that alone differs among them.

    Of results of one kind the last counts, of snapshots of one run the one with the most epochs.
    """
    newest: dict[str, Run] = {}
    for run in _runs(stored).values():
        key = _key(run.configuration)
        if key not in newest or run.epoch >= newest[key].epoch:
            newest[key] = run
    found = []
    arguments = dict.fromkeys(name for run in newest.values() for name in run.configuration if name not in REST)
    for argument in arguments:
        groups: dict[str, list[Run]] = {}
        for run in newest.values():
            groups.setdefault(_key(run.configuration, argument, *REST), []).append(run)
        for runs in groups.values():
            study = Study(argument, sorted(runs, key=lambda run: _order(run.configuration.get(argument))))
            if len(study.values) >= FEWEST:
                found.append(study)
    return found


def page(study: Study) -> Figure:
    """Accuracy, training NLL and error against it; the largest eigenvalue, NEP and APE, in six panels."""
    shown = [data for run in study.runs for data in run.results.values()]
    note = (
        "Points: training runs, with 95 % intervals over samples (eigenvalues: over mini-batches); lines: means over "
        f"runs of one value. Colours and words in the panel of the error: {study.argument}."
    )
    protocols = dict.fromkeys(str(data.attrs.get("protocol", "")) for data in shown)
    model = study.runs[0].configuration["model"]
    caption = f"{escaped(f'{model} over {study.argument}')}. {escaped('; '.join(protocols))}."
    figure = style.page([], [], height=3.8, caption=caption, note=note)
    (upper, trained, fit), (largest, nep, ape) = figure.subplots(2, 3)
    draw(study, upper, accuracy, "accuracy on test data")
    draw(study, trained, training_nll, "training NLL (nats)")
    draw_fit(study, fit)
    draw(study, largest, top_eigenvalue, "largest Hessian eigenvalue")
    draw(study, nep, lambda run: _interval(run, "hessian", "nep"), "negative eigenvalues (NEP)")
    draw(study, ape, mean_positive, "positive eigenvalues (APE)")
    return figure


def draw(study: Study, ax: Axes, number: Callable[[Run], Number], label: str) -> Axes:
    """Draw a number of every run over the argument, and the mean over runs of one value as a line."""
    marker, colors = _look(study)
    found = [number(run) for run in study.runs]
    places = [study.values.index(study.value(run)) for run in study.runs]
    for i, (place, (value, low, high)) in enumerate(zip(places, found, strict=True)):
        turn, several = places[:i].count(place), places.count(place)  # runs of one value stand side by side
        at = place + 0.3 * (turn - (several - 1) / 2) / max(several, 2)
        ax.errorbar([at], [value], yerr=_bars(value, low, high), color=colors[place], marker=marker, elinewidth=0.8)
    means = [
        np.mean([value for at, (value, *_) in zip(places, found, strict=True) if at == place])
        for place in range(len(study.values))
    ]
    ax.plot(range(len(means)), means, color="0.6", linewidth=0.9, zorder=0)
    ax.set_xticks(range(len(means)), study.values)
    ax.set(xlabel=study.argument, ylabel=label, xlim=(-0.4, len(means) - 0.6))
    if not np.isfinite([value for value, *_ in found]).any():
        style.write_centred(ax, "not measured", fontsize=style.SMALL)
    return ax


def draw_fit(study: Study, ax: Axes) -> Axes:
    """Draw the error on test data against the NLL on training data, a point per run with its value beside it."""
    marker, colors = _look(study)
    named: set[str] = set()
    for run in study.runs:
        value = study.value(run)
        color = colors[study.values.index(value)]
        nll, accurate = training_nll(run), accuracy(run)
        error = tuple(1 - accurate[i] for i in (0, 2, 1))
        ax.errorbar(
            [nll[0]], [error[0]], xerr=_bars(*nll), yerr=_bars(*error), color=color, marker=marker, elinewidth=0.8
        )
        if np.isfinite(nll[0] + error[0]) and value not in named:
            ax.annotate(value, (nll[0], error[0]), xytext=(3, 3), textcoords="offset points", fontsize=7, color=color)
            named.add(value)
    ax.set(xlabel="NLL on training data (nats)", ylabel="error on test data")
    if not any(np.isfinite(training_nll(run)[0]) for run in study.runs):
        style.write_centred(ax, "not measured", fontsize=style.SMALL)
    return ax


def table(study: Study) -> list[Row]:
    """The numbers of the figure, a row per run."""
    return [
        {
            study.argument: study.value(run),
            "seed": str(run.configuration.get("seed", "")),
            "accuracy": accuracy(run)[0],
            "training NLL": training_nll(run)[0],
            "largest eigenvalue": top_eigenvalue(run)[0],
            "NEP": _interval(run, "hessian", "nep")[0],
            "APE": mean_positive(run)[0],
        }
        for run in study.runs
    ]


def accuracy(run: Run) -> Number:
    """Accuracy on the test split."""
    return _interval(run, "test", "accuracy")


def training_nll(run: Run) -> Number:
    """NLL on the train split."""
    return _interval(run, "train", "nll")


def top_eigenvalue(run: Run) -> Number:
    """The largest eigenvalue of a mini-batch, mean over mini-batches."""
    return _interval(run, "hessian", "mean_largest")


def mean_positive(run: Run) -> Number:
    """The mean of the positive eigenvalues."""
    return _interval(run, "hessian", "ape")


def in_words(value: Any) -> str:
    """A value as on the command line."""
    if value is None:
        return "none"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _runs(stored: Iterable[tuple[str, xr.Dataset]]) -> dict[tuple[Any, ...], Run]:
    """The networks whose checkpoints say how they were built, with their results."""
    found: dict[tuple[Any, ...], Run] = {}
    for name, data in stored:
        configuration = json.loads(str(data.attrs.get("configuration", "")) or "{}")
        probe = name.partition("/")[0]
        if not configuration or probe not in ("calibration", "hessian") or "group" in data.dims:
            continue
        own = {"dropout masks": members_of(data), "smoothing inserted": str(data.attrs.get("smoothing", ""))}
        key = (str(data.attrs.get("checkpoint_sha256", "")), *own.values())
        run = found.setdefault(key, Run({**configuration, **own}, float(data.attrs.get("epoch", 0.0))))
        split = str(json.loads(str(data.attrs.get("spec", "")) or "{}").get("split", ""))
        if probe == "hessian" or split in ("train", "test"):
            run.results["hessian" if probe == "hessian" else split] = data
    return {key: run for key, run in found.items() if run.results}


def _key(configuration: dict[str, Any], *without: str) -> str:
    """What tells configurations apart, without some arguments."""
    return json.dumps({name: value for name, value in configuration.items() if name not in without}, sort_keys=True)


def _order(value: Any) -> tuple[Any, ...]:
    """Numbers in their order, then words, then none."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, in_words(value))


def _interval(run: Run, name: str, quantity: str) -> Number:
    data = run.results.get(name)
    if data is None or quantity not in data:
        return UNKNOWN
    low, high = ends_of(data, quantity)
    return float(data[quantity]), float(low), float(high)


def _bars(value: float, low: float, high: float) -> np.ndarray:
    bars: np.ndarray = np.nan_to_num(np.array([[value - low], [high - value]])).clip(min=0.0)
    return bars


def _look(study: Study) -> tuple[str, list[Any]]:
    """The marker of the network, and a colour for every value."""
    from matplotlib import colormaps

    kind = family(next(iter(study.runs[0].results.values())))
    marker = FAMILIES[kind][2] if kind in FAMILIES else OTHERS[0][1]
    return marker, [colormaps["viridis"](place) for place in np.linspace(0, 0.85, len(study.values))]

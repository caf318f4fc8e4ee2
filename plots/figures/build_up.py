"""Draw accuracy and loss of an AlterNet by its number of self-attentions (Park & Kim 2022, Fig. 12)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from landscape.options import counted
from landscape.plots import style
from landscape.plots.appearance import FAMILIES, escaped
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import intervals, means
from landscape.statistics.intervals import FEWEST

PUBLISHED = {("alternet50", "cifar100"): (0.8248, 0.8345, 0.8366, 0.8377, 0.8402)}  # for 0 to 4 MSAs
LABELS = {"accuracy": "test accuracy", "loss": "test loss (nats)"}


def draw(rows: Sequence[Mapping[str, Any]], ax: Axes, name: str) -> Axes:
    """Draw a metric of every network as a point, and the mean over seeds with its 95 % interval as a line."""
    _, color, marker = FAMILIES["AlterNet"]
    counts = sorted({int(row["msa"]) for row in rows})
    values = [column(rows, name, count) for count in counts]
    found = [means.mean_and_standard_error(of) for of in values]
    errors = np.nan_to_num([intervals.quantile(len(of)) * error for of, (_, error) in zip(values, found, strict=True)])
    ax.plot([row["msa"] for row in rows], [row[name] for row in rows], ".", color=color, alpha=0.35, markersize=4)
    ax.errorbar(counts, [mean for mean, _ in found], yerr=errors, color=color, marker=marker, elinewidth=0.8)
    published = PUBLISHED.get((str(rows[0]["model"]), str(rows[0]["data"])))
    if name == "accuracy" and published:
        ax.plot(range(len(published)), published, color="0.5", linestyle=":", marker="x")
    style.whole_numbers(ax)
    ax.set(xlabel="number of self-attentions (MSAs)", ylabel=LABELS[name])
    return ax


def page(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Accuracy and loss over the number of self-attentions."""
    seeds = sorted({int(row["seed"]) for row in rows})
    about = f"{rows[0]['model']}, {rows[0]['data']}"
    _, color, marker = FAMILIES["AlterNet"]
    legend = [Look("mean over seeds" if len(seeds) > 1 else "one seed", color, marker)]
    if (str(rows[0]["model"]), str(rows[0]["data"])) in PUBLISHED:
        legend.append(Look("published", "0.5", "x", ":"))
    text = (
        f"{escaped(about)}; {counted(len(rows), 'network')}. {points([int(row['msa']) for row in rows])} "
        "Self-attentions replace convolutions from the end of the last stage backward."
    )
    figure = style.page([], [], height=2.3, legend=legend, caption=text)
    for ax, name in zip(figure.subplots(1, 2), LABELS, strict=True):
        draw(rows, ax, name)
    return figure


def points(counts: Sequence[int]) -> str:
    """What the points of networks with these numbers of self-attentions are, and whether they have errors."""
    most = max(counts.count(count) for count in counts)
    if most == 1:
        return "One seed, so that there are no errors."
    bars = "error bars: 95 % intervals over seeds" if most >= FEWEST else f"no error bars, which need {FEWEST} seeds"
    return f"Dots: networks; line: means; {bars}."


def column(rows: Sequence[Mapping[str, Any]], name: str, count: int) -> np.ndarray:
    """A metric of the networks with that number of self-attentions."""
    return np.array([float(row[name]) for row in rows if int(row["msa"]) == count])

"""Draw accuracy, NLL and calibration error per corruption, mean over severities, all networks in each panel."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from landscape.options import counted
from landscape.plots import differences, rows
from landscape.plots.figure import Axes, Figure, Look
from landscape.statistics import corruption_summary, stored
from landscape.statistics.paired import Difference, by_error, comparable

MEANING = (
    "Scores on the test images under each common corruption, mean over the severities, with 95 % intervals over "
    "images; triangles are the clean images. Generated corruptions have the severities of ImageNet-C and are not "
    "comparable to published numbers of CIFAR-10-C, and none of them says how a network fares under others."
)
METRICS = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "ECE"}
NOTE = "Points: means over severities, with 95 % intervals over images. Triangles: clean images."


def draw(data: xr.Dataset, ax: Axes, metric: str = "accuracy", *, look: Look, shift: float = 0.0) -> Axes:
    """Draw the mean over severities of every corruption, below each other, and a triangle for the clean images."""
    value, ends = data[f"type_{metric}"].values, stored.ends_of(data, f"type_{metric}")
    rows.draw(ax, rows_of(data), value, ends, look=look, shift=shift)
    clean = float(data.attrs.get(f"clean_{metric}", np.nan))
    if np.isfinite(clean):
        ax.plot(clean, len(value) + shift, color=look.color, marker="v", linestyle="none", markersize=3.5)
    ax.set_xlabel(METRICS[metric])
    return ax


def page(results: Sequence[xr.Dataset], looks: Sequence[Look]) -> Figure:
    """One panel per score, every network in each; below, networks on the same images against the first one."""
    compared = alike(results)
    note = f"{NOTE} {differences.note(looks[compared[0]].label)}" if compared else NOTE
    below = differences.height(len(compared))
    figure, under = rows.page(results, looks, list(METRICS), draw, rows_of, note=note, below=below)
    if compared:
        first, *others = compared
        labels = {f"mean {name}": f"mean {label}" for name, label in METRICS.items()}
        found = [paired(results[i], results[first]) for i in others]
        differences.draw(differences.axes_in(under, len(labels)), labels, found, [looks[i] for i in others])
    return figure


def rows_of(data: xr.Dataset) -> list[str]:
    """The rows of the figure: the corruptions, and the clean images where their score is known."""
    known = np.isfinite(float(data.attrs.get("clean_accuracy", np.nan)))
    return [*short_names(data), *(["clean"] if known else [])]


def alike(results: Sequence[xr.Dataset]) -> list[int]:
    """Positions of finished results of the same images."""
    return comparable(results, images_of)


def images_of(data: xr.Dataset) -> tuple[str, ...]:
    """What results must share beside the clean samples, to be of the same images."""
    cells = [*data["corruption_name"].values.tolist(), *data["severity"].values.tolist()]
    return str(data.attrs.get("source", "")), *map(str, cells)


def short_names(data: xr.Dataset) -> list[str]:
    """Names of the corruptions, for axes."""
    return rows.names(data, "corruption_name")


def paired(data: xr.Dataset, other: xr.Dataset) -> Mapping[str, Difference]:
    """Of the means over corruptions and severities, paired over blocks of samples of the same images."""
    if data["done"].shape != other["done"].shape or images_of(data) != images_of(other):
        return {}
    found = corruption_summary.paired_difference(data, other)
    blocks = data.sizes["block"]
    return {
        f"mean {name}": by_error(
            value, of.error, blocks, f"paired over {counted(blocks, 'block')} of samples", (of.low, of.high)
        )
        for name, (value, of) in found.items()
    }

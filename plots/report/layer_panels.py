"""Collect the layer plots of the page: one value per layer and network, or a matrix of pairs of layers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from landscape.plots import FIGURES
from landscape.plots.figure import LayerPlot
from landscape.plots.report.panels import ERROR, Drawn, Panel, encoded, float32, of_probe, thinned
from landscape.statistics.stored import half_width

AXES = ("layer", "unit")  # of layers, and of units that a lesion removes
MOST_HEADS = 64


def collected(means: Sequence[Drawn], drawn: Sequence[Drawn]) -> dict[str, list[Panel]]:
    """What the page draws layer by layer, of means over seeds where there are any."""
    layers, similar = layer_plots(means), similarities(drawn)
    return {"layers": layers or ([{"title": "", "series": []}] if similar else []), "similarity": similar}


def layer_plots(drawn: Sequence[Drawn]) -> list[Panel]:
    """Every layer plot that some result has a finite value for, with one series per result."""
    found = []
    for probe, plot in ((figure.probe, plot) for figure in FIGURES.values() for plot in figure.layers):
        series = [held for one in of_probe(drawn, probe) if (held := _series(one, plot))]
        if series:
            about = {"title": plot.title, "unit": plot.unit, "log": plot.logarithmic, "bars": plot.bars}
            found.append({**about, "probe": probe, "quantity": plot.quantity, "series": series})
    return found


def _series(one: Drawn, plot: LayerPlot) -> Panel | None:
    data = one.data
    axis = next((axis for axis in AXES if plot.quantity in data and axis in data[plot.quantity].dims), "")
    if not axis or not {"name", "kind", "depth"} <= set(data) or not np.isfinite(data[plot.quantity].values).any():
        return None
    values = data[plot.quantity].transpose(axis, ...).values
    known = f"{plot.quantity}_se" in data
    halves = half_width(data.transpose(axis, ...), plot.quantity) if known else None
    held: dict[str, Any] = {
        "depth": float32(data["depth"].values),
        "layers": [str(name) for name in data["name"].values],
        "kinds": [str(kind) for kind in data["kind"].values],
    }
    if values.ndim == 2:  # (layer, head)
        known = np.isfinite(values)
        mean = np.where(known, values, 0.0).sum(axis=1) / np.where(known.any(axis=1), known.sum(axis=1), np.nan)
        held |= {"values": float32(mean), "heads": float32(values[:, :MOST_HEADS])}
    elif values.ndim == 1:
        held |= {"values": float32(values)} | ({} if halves is None else {"halves": float32(halves)})
    else:
        return None
    return one.head | held


def similarities(drawn: Sequence[Drawn]) -> list[Panel]:
    """Similarity of all pairs of layers, rows the layers, columns the other layers."""
    found = []
    for one in of_probe(drawn, "similarity"):
        if (
            "cka" not in one.data
            or not {"name", "other_name"} <= set(one.data)
            or set(one.data["cka"].dims) != {"layer", "other"}
        ):
            continue
        data = thinned(one.data, "layer", "other").transpose("layer", "other", ...)
        values = data["cka"].values
        if np.isfinite(values).any():
            held: Panel = {"cka": encoded(values)}
            held |= {"half": encoded(half_width(data, "cka"), bits=ERROR)} if "cka_se" in data else {}
            held |= {"layers": [str(name) for name in data["name"].values]}
            held |= {"others": [str(name) for name in data["other_name"].values]}
            found.append(one.head | held)
    return found

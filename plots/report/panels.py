"""Collect from the stored results what the page draws by itself: surfaces, trajectories, spectra."""

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from landscape.plots import FIGURES
from landscape.plots.figure import LayerPlot
from landscape.plots.figures import density, hessian
from landscape.plots.report.next_steps import unfinished
from landscape.statistics.stored import half_width

EXACT = 4096  # values up to which an array is written as float32
LARGEST = 201  # points along one side of a drawn grid; more are left out evenly
WIDE = 100.0  # ratio of the ends from which the scale is logarithmic
VALUE, ERROR = 16, 8  # bits of a number, and of its error, which on a logarithmic scale is known to a few percent


def float32(values: Any) -> dict[str, Any]:
    """An array as little-endian float32."""
    array = np.asarray(values, dtype="<f4")
    return {"t": "f4", "n": list(array.shape), "b": base64.b64encode(array.tobytes()).decode()}


def encoded(values: np.ndarray, finished: np.ndarray | None = None, *, bits: int = VALUE) -> dict[str, Any]:
    """An array as float32 if it is small, else as integers of 8 or 16 bits between its extremes, compressed.

    The codes 0 to 2^bits - 3 are the scale, logarithmic where values of one sign span a factor of 100; 0 stands for a
    zero there. Values that are not finite keep their kind: the last code is unfinished, the one before finished with a
    loss that overflowed.
    """
    done = np.ones(values.shape, bool) if finished is None else finished
    if values.size <= EXACT:
        return float32(np.where(done, np.where(np.isfinite(values), values, np.inf), np.nan))
    top = 2**bits - 3
    known = np.isfinite(values) & done
    inside = values[known] if known.any() else np.array([0.0, 1.0])
    positive = inside[inside > 0]
    logarithmic = bool(inside.min() >= 0 and positive.size and positive.max() > WIDE * positive.min())
    low, high = np.log([positive.min(), positive.max()]) if logarithmic else (inside.min(), inside.max())
    zero = logarithmic and positive.size < inside.size
    low -= (high - low) / (top - 1) if zero else 0.0
    scaled = (
        np.log(np.where(known & (values > 0), values, np.exp(low))) if logarithmic else np.where(known, values, low)
    )
    code = np.rint(top * (scaled - low) / ((high - low) or 1.0)).astype(np.int64)
    code = np.where(known, code, np.where(done, top + 1, top + 2))
    about = {"lo": float(low), "hi": float(high), "log": logarithmic, "zero": bool(zero)}
    return {"t": f"u{bits // 8}", "n": list(values.shape), **about, "z": base64.b64encode(packed(code, bits)).decode()}


def packed(code: np.ndarray, bits: int) -> bytes:
    """Integers as what is left when each is predicted from its neighbours (left + above - above left), deflated.

    What is left is small on a smooth surface; its sign becomes the last bit, and its bytes stand apart, low ones first.
    """
    grid = np.pad(code.reshape(-1, code.shape[-1]), ((1, 0), (1, 0)))
    left = grid[1:, 1:] - grid[1:, :-1] - grid[:-1, 1:] + grid[:-1, :-1]
    half = 2 ** (bits - 1)
    left = (left + half) % (2 * half) - half
    left = np.where(left < 0, -2 * left - 1, 2 * left).ravel()
    planes = [(left >> shift & 255).astype(np.uint8) for shift in range(0, bits, 8)]
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(np.concatenate(planes).tobytes()) + deflate.flush()


def evenly(size: int, most: int = LARGEST) -> np.ndarray:
    """Positions of at most so many points along an axis, evenly spaced, both ends among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))


def grid(data: xr.Dataset, name: str, at: Mapping[str, np.ndarray], values: np.ndarray | None = None) -> np.ndarray:
    """A quantity, or other values of its form, at positions on its axes, in the order of these."""
    one = data.variables[name]
    part = (one.values if values is None else values)[np.ix_(*(at[str(dim)] for dim in one.dims))]
    return np.asarray(part.transpose([one.dims.index(axis) for axis in at]))


Panel = dict[str, Any]
MOST_NODES = 4000  # of a spectrum that is drawn
PARTS = {  # of the page, by their names in `FigureEntry.live`
    "surface": "Loss surface", "trajectory": "Training trajectory", "spectra": "Hessian spectra",
    "layers": "Layer by layer",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A result with its name in legends, its colour, and the name of its checkpoint."""

    data: xr.Dataset
    name: str
    color: str
    checkpoint: str

    @property
    def head(self) -> Panel:
        """What every panel says about a result: name, colour, checkpoint, and how much of it is missing."""
        found: Panel = {"name": self.name, "color": self.color, "who": self.checkpoint}
        missing = unfinished(self.data)
        return found | ({"missing": missing} if missing else {})


def of_probe(drawn: Sequence[Drawn], probe: str) -> list[Drawn]:
    """The results of a probe."""
    return [one for one in drawn if one.data.attrs.get("probe") == probe]


def _drawable(drawn: Sequence[Drawn], figure: str) -> list[Drawn]:
    """The results that a figure can show."""
    return [one for one in of_probe(drawn, FIGURES[figure].probe) if FIGURES[figure].drawable(one.data)]


def collected(drawn: Sequence[Drawn]) -> dict[str, list[Panel]]:
    """What the page draws of each kind, under the names that its script knows."""
    return {
        "surface": surfaces(drawn), "trajectory": trajectories(drawn), "spectra": spectra(drawn),
        "densities": densities(drawn),
    }  # fmt: skip


def surfaces(drawn: Sequence[Drawn]) -> list[Panel]:
    """Surfaces that have a finite value: loss and error over the grid, rows along y, with the path on their plane."""
    found = []
    for one in of_probe(drawn, "surface"):
        data, stored = one.data, one.data.variables
        if not {"x", "y", "loss", "done"} <= set(stored) or {"x", "y"} != set(stored["loss"].dims):
            continue
        x, y, loss = (stored[name].values for name in ("x", "y", "loss"))
        if not np.isfinite(loss).any():
            continue
        at = {"y": evenly(y.size), "x": evenly(x.size)}
        done = grid(data, "done", at) == 1
        panel = one.head | {"x": float32(x[at["x"]]), "y": float32(y[at["y"]])}
        labels = [*(_axis(data, name) for name in ("x", "y", "loss")), f"distance along the slice{_units(data, 'x')}"]
        panel |= {"loss": encoded(grid(data, "loss", at), done), "labels": labels}
        if of := next((name for name in ("rise", "loss") if f"{name}_se" in data), ""):
            words = str(stored[f"{of}_se"].attrs.get("long_name", "")).replace("standard error", "95 % interval")
            half = grid(data, f"{of}_se", at, half_width(data, of))
            panel |= {"half": encoded(half, done, bits=ERROR), "error": words}
        panel["lost"] = int((~np.isfinite(loss) & (stored["done"].values == 1)).sum())
        if done.size < loss.size:
            panel["thinned"] = f"{at['x'].size} x {at['y'].size} of {x.size} x {y.size}"
        if {"path_x", "path_y"} <= set(data):
            path_x, path_y = (stored[name].values for name in ("path_x", "path_y"))
            names = stored["path_name"].values if "path_name" in data else range(path_x.size)
            panel["path"] = {
                "x": float32(path_x), "y": float32(path_y), "name": [str(name) for name in names],
                "joined": data.attrs.get("plane") != "checkpoints",
            }  # fmt: skip
        found.append(panel)
    return found


def trajectories(drawn: Sequence[Drawn]) -> list[Panel]:
    """Training runs: place on the principal plane, radius and angle, own loss and that on the plane, by epoch."""
    found = []
    names = ("epoch", "radius", "angle", "pc1", "pc2", "off_plane", "loss", "accuracy", "plane_loss")
    for one in _drawable(drawn, "trajectory"):
        held = {name: float32(one.data.variables[name].values) for name in names if name in one.data}
        held.setdefault("epoch", float32(np.arange(one.data.variables["radius"].size)))
        held |= {"loss_half": float32(half_width(one.data, "loss"))} if "loss_se" in one.data else {}
        found.append(one.head | held | {"label": f"loss{_units(one.data, 'loss')}" if "loss" in one.data else ""})
    return found


def spectra(drawn: Sequence[Drawn]) -> list[Panel]:
    """Max-eigenvalue spectra: the finite eigenvalues of all mini-batches, and how many did not converge.

    A side with fewer than `few` is drawn as the figure draws it.
    """
    found = []
    for one in _drawable(drawn, "hessian"):
        values = one.data.variables["eigenvalue"].values
        known = np.isfinite(values)
        unsure = int((known & (one.data.variables["converged"].values == 0)).sum()) if "converged" in one.data else 0
        found.append(one.head | {"values": float32(values[known][:MOST_NODES]), "unsure": unsure, "few": hessian.FEW})
    return found


def densities(drawn: Sequence[Drawn]) -> list[Panel]:
    """Densities of all eigenvalues: the nodes of the quadrature, their weights, which sum to 1, and the figure's axis.

    `kernel` is what broadens a node there, on the axis that is linear up to `linear`.
    """
    shown = _drawable(drawn, "density")
    resolution = density.axis_resolution_of([one.data for one in shown]) if shown else None
    found = []
    for one in shown:
        nodes, weights = (one.data.variables[name].values.ravel() for name in ("nodes", "weights"))
        known = np.isfinite(nodes) & np.isfinite(weights)
        weight = weights[known] / (weights[known].sum() or 1.0)
        largest = np.sort(np.argsort(-weight, kind="stable")[:MOST_NODES])
        held = {"values": float32(nodes[known][largest]), "weights": float32(weight[largest])}
        assert resolution is not None
        found.append(one.head | held | {"linear": resolution.linear, "kernel": resolution.width})
    return found


def _axis(data: xr.Dataset, name: str) -> str:
    return str(data.variables[name].attrs.get("long_name", name)) + _units(data, name)


def _units(data: xr.Dataset, name: str) -> str:
    """Units in brackets, if there are any."""
    units = str(data.variables[name].attrs.get("units", "1"))
    return f" ({units})" if units not in ("1", "") else ""


AXES = ("layer", "unit")  # of layers, and of units that a lesion removes
MOST_HEADS = 64


def layers_collected(means: Sequence[Drawn], drawn: Sequence[Drawn]) -> dict[str, list[Panel]]:
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
    axis = next((axis for axis in AXES if plot.quantity in data and axis in data.variables[plot.quantity].dims), "")
    if (
        not axis
        or not {"name", "kind", "depth"} <= set(data)
        or not np.isfinite(data.variables[plot.quantity].values).any()
    ):
        return None
    data = data if data.variables[plot.quantity].dims[0] == axis else data.transpose(axis, ...)
    values = data.variables[plot.quantity].values
    known = f"{plot.quantity}_se" in data
    halves = half_width(data, plot.quantity) if known else None
    held: dict[str, Any] = {
        "depth": float32(data.variables["depth"].values),
        "layers": [str(name) for name in data.variables["name"].values],
        "kinds": [str(kind) for kind in data.variables["kind"].values],
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
            or set(one.data.variables["cka"].dims) != {"layer", "other"}
        ):
            continue
        data, stored = one.data, one.data.variables
        layers, others = (stored[name].values for name in ("name", "other_name"))
        at = {"layer": evenly(layers.size), "other": evenly(others.size)}
        values = grid(data, "cka", at)
        if np.isfinite(values).any():
            held: Panel = {"cka": encoded(values)}
            if "cka_se" in data:
                held["half"] = encoded(grid(data, "cka_se", at, half_width(data, "cka")), bits=ERROR)
            held |= {"layers": [str(name) for name in layers[at["layer"]]]}
            held |= {"others": [str(name) for name in others[at["other"]]]}
            found.append(one.head | held)
    return found

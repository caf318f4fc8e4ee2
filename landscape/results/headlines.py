"""What a stored answer says, in the few numbers that stand for it: of every probe its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

HEIGHT_RADIUS = 0.5
Numbers = dict[str, float | str]


def numbers(data: xr.Dataset) -> Numbers:
    """The few numbers that stand for an answer; of a probe without an entry below, its scalar summaries."""
    found = HEADLINES.get(str(data.attrs.get("probe", "")), scalars)(data)
    return {name: value for name, value in found.items() if isinstance(value, str) or np.isfinite(value)}


def text(found: Numbers) -> str:
    """Numbers as `name value, name value`."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}" for name, value in found.items()
    )


def scalars(data: xr.Dataset) -> Numbers:
    """Every stored number without an axis."""
    return {str(n): v.item() for n, v in data.data_vars.items() if v.ndim == 0 and v.dtype.kind in "fiu"}


def surface(data: xr.Dataset) -> Numbers:
    """Loss and accuracy at the centre, the mean rise of the loss at a radius, and what a fast mode costs."""
    found: Numbers = {}
    for name in ("loss", "accuracy"):
        if name in data and {"x", "y"} == set(data[name].dims):
            x, y = (np.flatnonzero(np.abs(data[axis].values) < 1e-9) for axis in ("x", "y"))
            if len(x) and len(y):
                found[name] = data[name].transpose("x", "y").values[x[0], y[0]].item()
    if "objective" in data and np.isfinite(data["objective"]).any():
        at = data["objective"].argmin(("x", "y"))
        where = ", ".join(f"{data[axis][at[axis]].item():g}" for axis in ("x", "y"))
        found |= {"least objective": data["objective"].min().item(), "at": f"({where})"}
    if "height" in data and HEIGHT_RADIUS in data["radius"]:
        found[f"height at {HEIGHT_RADIUS:g}"] = data["height"].sel(radius=HEIGHT_RADIUS).item()
    measures = {"hold_out_error": "hold-out error at most", "deviation_max": "deviation at most (standard errors)"}
    return found | {text: data[name].item() for name, text in measures.items() if name in data}


def line(data: xr.Dataset) -> Numbers:
    """Between checkpoints the highest barrier with its error; else the loss at the checkpoint and the largest one."""
    barrier = _values(data, "barrier")
    if barrier.size:
        top = int(np.nanargmax(data["barrier"].values))
        names = {
            "barrier": "barrier",
            "barrier_se": "barrier_se",
            "barrier_at": "at",
            "accuracy_barrier": "accuracy barrier",
        }
        return {shown: data[name].values[top].item() for name, shown in names.items()}
    loss = data["loss"].where(data["done"] == 1) if {"loss", "done", "t"} <= set(data.variables) else xr.DataArray()
    if loss.ndim != 2:
        return {}
    start = loss.transpose("direction", "t").values[:, np.flatnonzero(data["t"].values == 0.0)]
    return {"loss": start[0, 0].item() if start.size else np.nan, "highest": loss.max().item()}


def trajectory(data: xr.Dataset) -> Numbers:
    """Shares of the path's variance on its principal axes, and the farthest snapshot from their plane."""
    found: Numbers = {f"pc{i + 1}": v for i, v in enumerate(_values(data, "explained_variance"))}
    off = _values(data, "off_plane")
    return found | ({"off plane at most": off.max()} if off.size else {})


def fourier(data: xr.Dataset) -> Numbers:
    """Relative log amplitude at the highest frequency of the first and of the last layer that has one."""
    return _ends(_values(data, "high_frequency"))


def variance(data: xr.Dataset) -> Numbers:
    """Feature-map variance of the first and of the last layer that has a map."""
    return _ends(_values(data, "variance"))


def lesion(data: xr.Dataset) -> Numbers:
    """Accuracy of the intact network, the largest drop of it, and the unit that it belongs to."""
    drop = data["accuracy_drop"].values if "accuracy_drop" in data else np.array([])
    if not np.isfinite(drop).any():
        return {}
    worst = int(np.nanargmax(drop))
    intact = float(data.attrs.get("intact_accuracy", np.nan))
    return {"intact accuracy": intact, "largest drop": drop[worst].item(), "at": str(data["name"].values[worst])}


def noise(data: xr.Dataset) -> Numbers:
    """Accuracy without noise, the largest drop of it, the band that it belongs to, and the bands without any."""
    drop = data["accuracy_drop"].values if "accuracy_drop" in data else np.array([])
    empty = str(data.attrs.get("empty_bands", ""))
    named: Numbers = {"bands without a frequency": empty} if empty else {}
    if not np.isfinite(drop).any():
        return named
    worst = int(np.nanargmax(drop))
    intact = float(data.attrs.get("intact_accuracy", np.nan))
    at = f"{data['band'].values[worst]:g} pi"
    return {"intact accuracy": intact, "largest drop": drop[worst].item(), "at": at, **named}


def probe_linear(data: xr.Dataset) -> Numbers:
    """Accuracy of the linear probe of the first and of the last layer, and of the best with its name."""
    values = data["accuracy"].values if "accuracy" in data else np.array([])
    if not np.isfinite(values).any():
        return {}
    best = int(np.nanargmax(values))
    found = {**_ends(_values(data, "accuracy")), "best": values[best].item(), "at": str(data["name"].values[best])}
    open_fits = int((data["converged"].values == 0).sum()) if "converged" in data else 0
    return {**found, "not converged": open_fits} if open_fits else found


def similarity(data: xr.Dataset) -> Numbers:
    """Alignment of neighbouring layers on average, and of the first layer with the last."""
    if "cka" not in data:
        return {}
    values = data["cka"].values
    found: Numbers = {"first with last": values[0, -1].item()}
    if not data.attrs.get("against") and len(values) > 1:
        found = {"neighbours": np.diagonal(values, 1).mean().item(), **found}
    return found


def attention(data: xr.Dataset) -> Numbers:
    """Attention distance and normalised mutual information, mean over heads, of the first and the last layer."""
    found: Numbers = {}
    for name, word in (("distance", "distance"), ("mutual_information", "NMI")):
        rows = data[name].values if name in data else np.empty((0, 0))
        means = np.array([row[np.isfinite(row)].mean() for row in rows if np.isfinite(row).any()])
        found |= {f"{word} {key}": value for key, value in _ends(means).items()}
    return found


def hessian(data: xr.Dataset) -> Numbers:
    """Share of negative eigenvalues and mean of the positive ones, or the sharpest layer; and what to distrust."""
    found: Numbers = {name: data[name].item() for name in ("nep", "ape") if name in data and data[name].ndim == 0}
    values = data["eigenvalue"] if "eigenvalue" in data else xr.DataArray(np.empty((0, 0)), dims=("batch", "rank"))
    if "group" in values.dims and np.isfinite(values).any():
        largest = values.max(("batch", "rank"))
        found |= {
            "largest": largest.max().item(),
            "in": str(data["name"].values[int(np.nanargmax(largest.values))]),
        }
    finished = data["done"] == 1 if "done" in data else xr.zeros_like(values.isel(rank=0), dtype=bool)
    lost = finished & (values.count("rank") == 0)
    if lost.any():
        found["not finite"] = _mini_batches(lost)
    if "converged" in data:
        unsure = (data["converged"] == 0).where(np.isfinite(values), other=False)
        if unsure.any():
            found["not converged"] = (
                f"{int(unsure.sum())} of {int(np.isfinite(values).sum())} values, {_mini_batches(unsure)}"
            )
    if "missed" in data and (data["missed"] > 0).any():
        found["missed by the first search"] = int(data["missed"].sum())
    return found


def _mini_batches(where: xr.DataArray, most: int = 5) -> str:
    """Mini-batches by name: `mini-batches 3, 7, ...`."""
    others = [dim for dim in where.dims if dim != "batch"]
    indices = np.flatnonzero(where.any(others).values) if others else np.flatnonzero(where.values)
    named = ", ".join(str(i) for i in indices[:most])
    return f"mini-batch{'es' if len(indices) > 1 else ''} {named}{', ...' if len(indices) > most else ''}"


def trace(data: xr.Dataset) -> Numbers:
    """The trace over all samples with its error, and how many mini-batches it is without."""
    found: Numbers = {name: data[name].item() for name in ("trace", "trace_se") if name in data}
    lost = int(((data["done"] == 1) & ~np.isfinite(data["batch_trace"])).sum()) if "batch_trace" in data else 0
    return found | ({"mini-batches not finite": lost} if lost else {})


def density(data: xr.Dataset) -> Numbers:
    """Mean eigenvalue with its error, and both ends of the spectrum."""
    return {name: data[name].item() for name in ("mean", "mean_se", "smallest", "largest") if name in data}


def evaluate(data: xr.Dataset) -> Numbers:
    """Loss and accuracy."""
    return {name: data[name].values[-1].item() for name in ("loss", "accuracy") if name in data}


HEADLINES: Mapping[str, Callable[[xr.Dataset], Numbers]] = {
    "surface": surface,
    "line": line,
    "trajectory": trajectory,
    "hessian": hessian,
    "trace": trace,
    "density": density,
    "fourier": fourier,
    "variance": variance,
    "similarity": similarity,
    "attention": attention,
    "lesion": lesion,
    "noise": noise,
    "probe-linear": probe_linear,
    "evaluate": evaluate,
}


def _values(data: xr.Dataset, name: str) -> np.ndarray:
    """The finite values of a quantity in order, none where the file has none."""
    values = data[name].values if name in data else np.array([])
    return np.asarray(values[np.isfinite(values)])


def _ends(values: np.ndarray) -> Numbers:
    return {"shallowest": values[0].item(), "deepest": values[-1].item()} if values.size else {}

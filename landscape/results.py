"""The read side of a results file: labelled arrays, the same that `xr.open_dataset(..., engine="h5netcdf")` gives.

Read without locks, so that a reader never blocks a writer; a writer replaces the file as a whole, so that a reader
sees a complete one. Only what the file itself holds is read: links to other files are not followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray as xr

from landscape import store
from landscape.within import own

# What the HDF5 dimension-scale convention and netCDF-4 write beside a dataset's own attributes.
CONVENTION = {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "DIMENSION_LABELS"} | {
    "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCProperties"
}  # fmt: skip
HEIGHT_RADIUS = 0.5
Numbers = dict[str, float | str]


def open(path: Path | str) -> xr.DataTree:
    """The whole file as a tree: `tree["hessian/vit_demo-digits-0123456789"]`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is no results file; see the message.
    """
    path = Path(path)
    with _file(path) as file:
        nodes = {name: _dataset(group) for name, group in _groups(file)}
        return xr.DataTree.from_dict({"/": xr.Dataset(attrs=_attributes(file)), **nodes})


def groups(path: Path | str) -> list[tuple[str, xr.Dataset]]:
    """Every stored answer as (group, dataset), by probe, the oldest first.

    Raises:
        FileNotFoundError, ValueError: as `open`.
    """
    return find(path)


def find(path: Path | str, probe: str | None = None, label: str | None = None) -> list[tuple[str, xr.Dataset]]:
    """The answers of one probe, of one label, or of both, in the order of `groups`; empty where there are none."""
    with _file(Path(path)) as file:
        found = [
            (name, _dataset(group))
            for name, group in _groups(file)
            if probe in (None, name.partition("/")[0]) and label in (None, group.attrs.get("label"))
        ]
    return sorted(found, key=lambda item: (item[0].partition("/")[0], str(item[1].attrs.get("created", "")), item[0]))


def by_checkpoint(found: list[tuple[str, xr.Dataset]]) -> list[tuple[str, xr.Dataset]]:
    """Checkpoints in the order in which the study came to them, the same in every figure."""
    first: dict[str, tuple[str, str]] = {}
    for _, data in found:
        label, created = (str(data.attrs.get(key, "")) for key in ("label", "created"))
        first[label] = min(first.get(label, (created, label)), (created, label))
    return sorted(found, key=lambda item: first[str(item[1].attrs.get("label", ""))])


def summary(path: Path | str) -> list[dict[str, Any]]:
    """One row per stored answer, in the order of `groups`: what it is, how far it got, what it says."""
    return [
        {
            "probe": name.partition("/")[0],
            "label": str(data.attrs.get("label", "")),
            "digest": name.rpartition("-")[2],
            "done": finished_units(data),
            "units": int(data["done"].size) if "done" in data else 0,
            "model": str(data.attrs.get("model", "")),
            "data": str(data.attrs.get("data", "")),
            "finished": str(data.attrs.get("finished", "")),
            "headline": text(numbers(data)),
        }
        for name, data in groups(path)
    ]


def headline(path: Path | str, group: str) -> str:
    """What one stored answer says, in a line.

    Raises:
        ValueError: the file holds no such group; FileNotFoundError, ValueError: as `open`.
    """
    with _file(Path(path)) as file:
        if group not in dict(_groups(file)):
            raise ValueError(f"{path} holds no group {group}; expected one of those that landscape show lists")
        return text(numbers(_dataset(file[group])))


def finished_units(data: xr.Dataset) -> int:
    """How many units of an answer are finished."""
    return int((data["done"] == 1).sum()) if "done" in data else 0


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
}


def _values(data: xr.Dataset, name: str) -> np.ndarray:
    """The finite values of a quantity in order, none where the file has none."""
    values = data[name].values if name in data else np.array([])
    return np.asarray(values[np.isfinite(values)])


def _ends(values: np.ndarray) -> Numbers:
    return {"shallowest": values[0].item(), "deepest": values[-1].item()} if values.size else {}


@contextlib.contextmanager
def _file(path: Path) -> Iterator[h5py.File]:
    store.check(path)
    with store.reading(path) as file:
        try:
            yield file
        except store.DAMAGE as error:
            raise store.damaged(path, error) from error


def _groups(file: h5py.File) -> Iterator[tuple[str, h5py.Group]]:
    """`<probe>/<label>-<digest>` groups, by hard links alone."""
    for probe in own(file):
        if isinstance(file[probe], h5py.Group):
            for name in own(file[probe]):
                group = file[probe][name]
                if isinstance(group, h5py.Group) and "probe" in group.attrs:
                    yield f"{probe}/{name}", group


def _dataset(group: h5py.Group) -> xr.Dataset:
    found = {name: group[name] for name in own(group)}
    found = {name: item for name, item in found.items() if isinstance(item, h5py.Dataset)}
    # A scale is recognised by its place in the file: HDF5 searches the whole file for the name of an object.
    names = {h5py.h5o.get_info(item.id).addr: name for name, item in found.items()}
    variables = {name: (_dims(name, item, names), _array(item), _attributes(item)) for name, item in found.items()}
    data = xr.Dataset(variables, attrs=_attributes(group))
    data.encoding["group"] = group.name.strip("/")
    return data


def _dims(own: str, dataset: h5py.Dataset, names: Mapping[int, str]) -> tuple[str, ...]:
    """Names of the axes: of the attached scales; an axis without one (not written by us) is named after its array."""
    if dataset.is_scale:
        return (own,)
    scales = [[names.get(h5py.h5o.get_info(scale.id).addr) for scale in axis.values()] for axis in dataset.dims]
    return tuple((found and found[0]) or f"{own}_{i}" for i, found in enumerate(scales))


def _array(dataset: h5py.Dataset) -> np.ndarray:
    if h5py.check_string_dtype(dataset.dtype):
        return np.asarray(dataset.asstr()[()], dtype=object)
    return np.asarray(dataset[()])


def _attributes(item: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    return {name: _plain(item.attrs[name]) for name in item.attrs if name not in CONVENTION}


def _plain(value: Any) -> Any:
    """An attribute as Python has it."""
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value

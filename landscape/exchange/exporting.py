"""Export surfaces, lines and trajectories of a results file to the formats of other tools."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import xarray as xr

from landscape.exchange import paraview, park2022_csv, tomgoldstein
from landscape.exchange.grid import Grid, ProjectedTrajectory, grid_of, line_grids_of, trajectory_of
from landscape.results import reader
from landscape.results.malformed import readable

# format -> (suffix, writer)
WRITERS: Mapping[str, tuple[str, Callable[[Path, Grid], None]]] = {
    "tomgoldstein": (".h5", tomgoldstein.write_surface),
    "csv": (".csv", park2022_csv.write_surface),
    "vtp": (".vtp", paraview.write_vtp),
}
OF_LINES = ("tomgoldstein", "vtp")  # formats that can hold lines
TRAJECTORY_WRITERS: Mapping[str, tuple[str, Callable[[Path, ProjectedTrajectory], None]]] = {
    "tomgoldstein": ("_proj.h5", tomgoldstein.write_trajectory),
    "vtp": ("-path.vtp", paraview.write_trajectory),
}
T = TypeVar("T")
Part = tuple[str, Callable[[Path], None]]  # (end of the file name, writer)


def export(path: Path, out: Path, formats: Sequence[str], *, label: str | None = None) -> list[Path]:
    """Write every surface, line and trajectory with a finished unit to files `<label>-<digest>`, one per format.

    Several directions of a line get numbered files; a trajectory on a surface gets a separate file. `formats` are names
    in `WRITERS`. Returns the files.

    Raises:
        FileNotFoundError, ValueError: there is no results file, nothing to export in it, or `out` is not a folder.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, expected a folder; give another --out")
    found = [(name, data) for name, data in _results(path, label) if reader.finished_units(data)]
    parts = []
    for name, data in found:
        with readable(path, name):
            parts += [(name, part) for kind in formats for part in _parts(name, data, kind)]
    if not parts:
        labels = sorted({str(data.attrs.get("label", "")) for _, data in _results(path, None)})
        which = f" with the label {label} (labels: {', '.join(labels) or 'none'})" if label else ""
        if found:
            which = f" that {', '.join(formats)} can hold"
        raise ValueError(f"{path} holds no surface{which} to export; measure one first: landscape surface")
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (suffix, write) in parts:
        with readable(path, name):
            written.append(_write_atomically(out / f"{name.partition('/')[2]}{suffix}", write))
    return written


def _results(path: Path, label: str | None) -> list[tuple[str, xr.Dataset]]:
    return [result for probe in ("surface", "line", "trajectory") for result in reader.find(path, probe, label)]


def _parts(name: str, data: xr.Dataset, kind: str) -> list[Part]:
    """The files of one result in one format."""
    suffix, write = WRITERS[kind]
    if kind == "tomgoldstein":
        split = data.attrs.get("split") or json.loads(data.attrs.get("spec", "{}")).get("split", "train")
        write = partial(tomgoldstein.write_surface, split=str(split))
    probe = name.partition("/")[0]
    if probe == "trajectory":
        return _trajectory_files(trajectory_of(data), kind) if np.isfinite(data["pc1"].values).any() else []
    if probe == "line":
        grids = line_grids_of(data) if kind in OF_LINES else []
        numbers = [f"-{k}" if len(grids) > 1 else "" for k in range(len(grids))]
        return [(f"{n}{suffix}", _writer(write, grid)) for n, grid in zip(numbers, grids, strict=True)]
    grid = grid_of(data)
    path = [] if grid.trajectory is None else _trajectory_files(grid.trajectory, kind)
    return [(suffix, _writer(write, grid)), *path]


def _trajectory_files(trajectory: ProjectedTrajectory, kind: str) -> list[Part]:
    if kind not in TRAJECTORY_WRITERS or (kind == "vtp" and np.isfinite(trajectory.loss).sum() < 2):
        return []
    suffix, write = TRAJECTORY_WRITERS[kind]
    return [(suffix, _writer(write, trajectory))]


def _writer(write: Callable[[Path, T], None], what: T) -> Callable[[Path], None]:
    return lambda target: write(target, what)


def _write_atomically(target: Path, write: Callable[[Path], None]) -> Path:
    partial_file = target.with_name(f".{target.name}.partial")
    partial_file.unlink(missing_ok=True)  # perhaps a link
    try:
        write(partial_file)
        os.replace(partial_file, target)
    finally:
        partial_file.unlink(missing_ok=True)
    return target

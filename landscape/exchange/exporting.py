"""Export surfaces, lines and trajectories of a results file to other tools, such as ParaView (.vtp)."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar
from xml.sax.saxutils import quoteattr

import numpy as np
import xarray as xr

from landscape.exchange import csv_files, tomgoldstein
from landscape.exchange.grid import Grid, ProjectedTrajectory, grid_of, line_grids_of, trajectory_of
from landscape.results import reader


def write_vtp(path: Path, grid: Grid) -> None:
    """Write a surface as polygons or a line as a curve, with all quantities as point data; the height is the loss."""
    if "y" in grid.axes:
        points, quads, values = mesh(grid)
        _write(path, points, values, polygons=quads)
        return
    loss = grid.values["loss"]
    known = grid.done & np.isfinite(loss)
    points = np.column_stack([grid.axes["x"][known], np.zeros(known.sum()), loss[known]])
    _write(path, points, _complete({name: column[known] for name, column in grid.values.items()}))


def write_trajectory(path: Path, trajectory: ProjectedTrajectory) -> None:
    """Write a trajectory as a curve on the surface, without snapshots whose loss on the plane is unknown."""
    known = np.isfinite(trajectory.loss)
    points = np.column_stack([*trajectory.positions[:, known], trajectory.loss[known]])
    _write(path, points, {"loss": trajectory.loss[known], "snapshot": np.flatnonzero(known).astype(float)})


def _complete(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column for name, column in values.items() if np.isfinite(column).all()}


def _write(
    path: Path, points: np.ndarray, values: dict[str, np.ndarray], *, polygons: np.ndarray | None = None
) -> None:
    """Write polygons between the points, or a curve through them in their order."""
    cells = np.arange(len(points))[None] if polygons is None else polygons
    kind, ends = "Polys" if polygons is not None else "Lines", cells.shape[1] * np.arange(1, len(cells) + 1)
    arrays = "\n".join(_array(name, column) for name, column in values.items())
    sizes = {"Verts": 0, "Lines": 0, "Strips": 0, "Polys": 0, kind: len(cells)}
    counts = " ".join(f'NumberOf{name}="{size}"' for name, size in sizes.items())
    path.write_text(
        f"""<?xml version="1.0"?>
<VTKFile type="PolyData" version="0.1" byte_order="LittleEndian">
<PolyData>
<Piece NumberOfPoints="{len(points)}" {counts}>
<Points>
{_array("points", points)}
</Points>
<{kind}>
{_array("connectivity", cells, "Int64")}
{_array("offsets", ends, "Int64")}
</{kind}>
<PointData Scalars="loss">
{arrays}
</PointData>
</Piece>
</PolyData>
</VTKFile>
""",
        encoding="utf-8",
    )


def mesh(grid: Grid) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Points (n, 3), quadrilaterals between finished neighbours (m, 4), and the quantities at the points.

    Points without a finite loss are left out, with the cells that touch them. The decimal logarithm of the loss is
    included if it exists, for surfaces that span orders of magnitude.
    """
    loss = grid.values["loss"]
    known = grid.done & np.isfinite(loss)
    number = np.full(loss.shape, -1)
    number[known] = np.arange(known.sum())
    x, y = np.meshgrid(grid.axes["x"], grid.axes["y"], indexing="ij")
    corners = np.stack([number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]], axis=-1).reshape(-1, 4)
    points = np.column_stack([x[known], y[known], loss[known]])
    values = _complete({name: column[known] for name, column in grid.values.items()})
    if (loss[known] > 0).all():
        values["log10_loss"] = np.log10(loss[known])
    return points, corners[(corners >= 0).all(axis=1)], values


def _array(name: str, values: np.ndarray, kind: str = "Float64") -> str:
    components = f' NumberOfComponents="{values.shape[1]}"' if name == "points" else ""
    text = "\n".join(" ".join(map(repr, row)) for row in np.atleast_2d(values.T).T.tolist())
    return f'<DataArray type="{kind}" Name={quoteattr(name)}{components} format="ascii">\n{text}\n</DataArray>'


# format -> (suffix, writer)
WRITERS: Mapping[str, tuple[str, Callable[[Path, Grid], None]]] = {
    "tomgoldstein": (".h5", tomgoldstein.write_surface),
    "csv": (".csv", csv_files.write_surface),
    "vtp": (".vtp", write_vtp),
}
OF_LINES = ("tomgoldstein", "vtp")  # formats that can hold lines
TRAJECTORY_WRITERS: Mapping[str, tuple[str, Callable[[Path, ProjectedTrajectory], None]]] = {
    "tomgoldstein": ("_proj.h5", tomgoldstein.write_trajectory),
    "vtp": ("-path.vtp", write_trajectory),
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
        with reader.using(path, names=[name]):
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
        with reader.using(path, names=[name]):
            written.append(_write_atomically(out / f"{name.partition('/')[2]}{suffix}", write))
    return written


def _results(path: Path, label: str | None) -> list[tuple[str, xr.Dataset]]:
    return [result for probe in ("surface", "line", "trajectory") for result in reader.find(path, probe, label)]


def _parts(name: str, data: xr.Dataset, kind: str) -> list[Part]:
    suffix, write = WRITERS[kind]
    if kind == "tomgoldstein":
        split = data.attrs.get("split") or json.loads(data.attrs.get("spec", "{}")).get("split")
        write = partial(tomgoldstein.write_surface, split=str(split or "train"))  # data of one part have none
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

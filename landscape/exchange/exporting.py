"""Export surfaces, lines and trajectories of a results file to other tools, such as ParaView (.vtp)."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
import xarray as xr

from landscape.exchange import csv_files, tomgoldstein
from landscape.exchange.grid import Grid, ProjectedTrajectory, grid_of, line_grids_of, trajectory_of
from landscape.results import reader
from landscape.results.replacing import replacing


def vtp(grid: Grid) -> bytes:
    """A surface as polygons or a line as a curve, with all quantities as point data; the height is the loss."""
    if "y" in grid.axes:
        points, quads, values = mesh(grid)
        return _poly_data(points, values, polygons=quads)
    loss = grid.values["loss"]
    known = grid.done & np.isfinite(loss)
    points = np.column_stack([grid.axes["x"][known], np.zeros(known.sum()), loss[known]])
    return _poly_data(points, _complete({name: column[known] for name, column in grid.values.items()}))


def vtp_of_trajectory(trajectory: ProjectedTrajectory) -> bytes:
    """A trajectory as a curve on the surface, without snapshots whose loss on the plane is unknown."""
    known = np.isfinite(trajectory.loss)
    points = np.column_stack([*trajectory.positions[:, known], trajectory.loss[known]])
    return _poly_data(points, {"loss": trajectory.loss[known], "snapshot": np.flatnonzero(known).astype(float)})


def _complete(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column for name, column in values.items() if np.isfinite(column).all()}


def _poly_data(points: np.ndarray, values: dict[str, np.ndarray], *, polygons: np.ndarray | None = None) -> bytes:
    """Polygons between the points, or a curve through them in their order."""
    cells = np.arange(len(points))[None] if polygons is None else polygons
    kind, ends = "Polys" if polygons is not None else "Lines", cells.shape[1] * np.arange(1, len(cells) + 1)
    arrays = "\n".join(_array(name, column) for name, column in values.items())
    sizes = {"Verts": 0, "Lines": 0, "Strips": 0, "Polys": 0, kind: len(cells)}
    counts = " ".join(f'NumberOf{name}="{size}"' for name, size in sizes.items())
    return f"""<?xml version="1.0"?>
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
""".encode()


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
WRITERS: Mapping[str, tuple[str, Callable[[Grid], bytes]]] = {
    "tomgoldstein": (".h5", tomgoldstein.surface_file),
    "csv": (".csv", csv_files.surface_file),
    "vtp": (".vtp", vtp),
}
OF_LINES = ("tomgoldstein", "vtp")  # formats that can hold lines
TRAJECTORY_WRITERS: Mapping[str, tuple[str, Callable[[ProjectedTrajectory], bytes]]] = {
    "tomgoldstein": ("_proj.h5", tomgoldstein.trajectory_file),
    "vtp": ("-path.vtp", vtp_of_trajectory),
}
Part = tuple[str, Callable[[], bytes]]  # (end of the file name, what makes its content)


def export(path: Path, out: Path, formats: Sequence[str], *, label: str | None = None) -> list[Path]:
    """Write every surface, line and trajectory with a finished unit to files `<label>-<digest>`, one per format.

    Several directions of a line get numbered files; a trajectory on a surface gets a separate file. `formats` are names
    in `WRITERS`. Returns the files.

    Raises:
        FileNotFoundError, ValueError: there is no results file, or nothing to export in it.
    """
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
    for name, (suffix, content) in parts:
        written.append(out / f"{name.partition('/')[2]}{suffix}")
        with reader.using(path, names=[name]), replacing(written[-1]) as stream:
            stream.write(content())
    return written


def _results(path: Path, label: str | None) -> list[tuple[str, xr.Dataset]]:
    return [result for probe in ("surface", "line", "trajectory") for result in reader.find(path, probe, label)]


def _parts(name: str, data: xr.Dataset, kind: str) -> list[Part]:
    suffix, write = WRITERS[kind]
    if kind == "tomgoldstein":
        split = data.attrs.get("split") or json.loads(data.attrs.get("spec", "{}")).get("split")
        write = partial(tomgoldstein.surface_file, split=str(split or "train"))  # data of one part have none
    probe = name.partition("/")[0]
    if probe == "trajectory":
        return _trajectory_files(trajectory_of(data), kind) if np.isfinite(data["pc1"].values).any() else []
    if probe == "line":
        grids = line_grids_of(data) if kind in OF_LINES else []
        numbers = [f"-{k}" if len(grids) > 1 else "" for k in range(len(grids))]
        return [(f"{n}{suffix}", partial(write, grid)) for n, grid in zip(numbers, grids, strict=True)]
    grid = grid_of(data)
    path = [] if grid.trajectory is None else _trajectory_files(grid.trajectory, kind)
    return [(suffix, partial(write, grid)), *path]


def _trajectory_files(trajectory: ProjectedTrajectory, kind: str) -> list[Part]:
    if kind not in TRAJECTORY_WRITERS or (kind == "vtp" and np.isfinite(trajectory.loss).sum() < 2):
        return []
    suffix, write = TRAJECTORY_WRITERS[kind]
    return [(suffix, partial(write, trajectory))]

"""Hold surfaces, lines and trajectories as plain arrays, for exchange with other tools."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr

from landscape.probe import Quantity

KNOWN: Mapping[str, Quantity] = {
    "loss": Quantity("loss", "nats"),
    "loss_se": Quantity("standard error of the loss over samples", "nats", over="samples"),
    "l2": Quantity("sum of the norms of the weight tensors"),
    "accuracy": Quantity("accuracy"),
}


@dataclass(frozen=True, eq=False)
class ProjectedTrajectory:
    """The trajectory of a run on a plane."""

    positions: np.ndarray  # coordinates of its snapshots, (2, n)
    loss: np.ndarray  # on the plane at these positions, (n,); NaN if unknown


@dataclass(frozen=True, eq=False)
class Grid:
    """Values at the points of a plane (or of a line, without y), in float64."""

    axes: Mapping[str, np.ndarray]  # x and y, or x alone, ascending; zero exactly zero
    values: Mapping[str, np.ndarray]  # name -> array over the axes; NaN where unknown
    done: np.ndarray  # 1 where a point has been evaluated, even if the result is not finite
    facts: Mapping[str, str | float] = field(default_factory=dict)  # further attributes from the file
    name: str = ""  # distinguishes several grids of one file
    trajectory: ProjectedTrajectory | None = None  # of a run, on this plane


def grid_of(data: xr.Dataset) -> Grid:
    """A stored surface as a grid."""
    stored = {str(name): value for name, value in data.data_vars.items() if set(value.dims) == {"x", "y"}}
    values = {name: _floats(value.transpose("x", "y")) for name, value in stored.items()}
    done = values.pop("done") == 1
    axes = {axis: _floats(data[axis]) for axis in ("x", "y")}
    facts = {key: data.attrs[key] for key in ("l2_definition",) if key in data.attrs}
    trajectory = _trajectory_over(data, axes, values["loss"]) if "path_x" in data else None
    return Grid(axes, values, done, facts, trajectory=trajectory)


def line_grids_of(data: xr.Dataset) -> list[Grid]:
    """The lines of a stored result, one grid each."""
    found = []
    for k in range(data.sizes["direction"]):
        here = data.isel(direction=k).drop_vars("direction", errors="ignore")
        over_t = {str(name): _floats(value) for name, value in here.data_vars.items() if value.dims == ("t",)}
        values = {name: value for name, value in over_t.items() if name in KNOWN}
        found.append(Grid({"x": _floats(data["t"])}, values, over_t["done"] == 1))
    return found


def trajectory_of(data: xr.Dataset) -> ProjectedTrajectory:
    """A stored trajectory on its principal plane."""
    positions = np.stack([_floats(data[name]) for name in ("pc1", "pc2")])
    return ProjectedTrajectory(positions, _floats(data["plane_loss"]))


def _trajectory_over(data: xr.Dataset, axes: Mapping[str, np.ndarray], loss: np.ndarray) -> ProjectedTrajectory:
    """A stored trajectory with the loss of the surface, bilinear between grid points, NaN outside the grid."""
    from scipy.interpolate import RegularGridInterpolator

    positions = np.stack([_floats(data[name]) for name in ("path_x", "path_y")])
    interpolate = RegularGridInterpolator((axes["x"], axes["y"]), loss, bounds_error=False)
    return ProjectedTrajectory(positions, np.asarray(interpolate(positions.T)))


def _floats(values: xr.DataArray) -> np.ndarray:
    return np.asarray(values.values, dtype=float)


def ascending(axes: Sequence[np.ndarray]) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Axes in ascending order with an exact zero, and the index that sorts arrays over them accordingly."""
    orders = [np.argsort(axis, kind="stable") for axis in axes]
    sorted_axes = [axis[order] for axis, order in zip(axes, orders, strict=True)]
    exact = [np.where(np.abs(a) < 1e-12 * np.ptp(a), 0.0, a) for a in sorted_axes]
    return exact, np.ix_(*orders)


def table_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of the lines of a CSV file. Raises ValueError: a cell is longer than any that a table has."""
    with path.open(newline="", encoding="utf-8", errors="replace") as stream:
        try:
            for number, row in enumerate(csv.reader(stream), start=1):
                yield number, [cell.strip() for cell in row]
        except csv.Error as error:
            raise ValueError(f"{path} is not a table ({error}); give one with short fields") from None

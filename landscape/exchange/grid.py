"""A surface without the protocol behind it: what other tools keep in their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xarray as xr

from landscape.probe import Quantity

KNOWN: Mapping[str, Quantity] = {
    "loss": Quantity("loss", "nats"),
    "loss_se": Quantity("standard error of the loss over samples", "nats"),
    "l2": Quantity("sum of the norms of the weight tensors"),
    "accuracy": Quantity("accuracy"),
}


@dataclass(frozen=True, eq=False)
class Course:
    """The path of a run on a plane.

    Args:
        places: coordinates of its snapshots, (2, n).
        loss: on the plane at these places, (n,); NaN where it is not known.
        names: of the snapshots; empty where a file does not say them.
    """

    places: np.ndarray
    loss: np.ndarray
    names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Grid:
    """Numbers over the points of a plane (or of a line, without y), in float64.

    Args:
        axes: x and y, or x alone, ascending; zero exactly zero.
        values: name -> array over the axes; NaN where nothing is known.
        done: 1 where a point has been evaluated, whatever came out.
        facts: what else the file says.
        name: what tells several grids of one file apart.
        course: the path of a run over it.
    """

    axes: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    done: np.ndarray
    facts: Mapping[str, str | float] = field(default_factory=dict)
    name: str = ""
    course: Course | None = None


def grid_of(data: xr.Dataset) -> Grid:
    """A stored surface as a grid."""
    names = [str(name) for name, value in data.data_vars.items() if value.dims in (("x", "y"), ("y", "x"))]
    values = {name: np.asarray(data[name].transpose("x", "y").values, dtype=float) for name in names}
    done = values.pop("done") == 1
    axes = {axis: np.asarray(data[axis].values, dtype=float) for axis in ("x", "y")}
    facts = {key: data.attrs[key] for key in ("l2_definition",) if key in data.attrs}
    return Grid(
        axes, values, done, facts, course=_course_over(data, axes, values["loss"]) if "path_x" in data else None
    )


def lines_of(data: xr.Dataset) -> list[Grid]:
    """The sections of a stored answer, one grid each."""
    found = []
    for k in range(data.sizes["direction"]):
        here = data.isel(direction=k).drop_vars("direction", errors="ignore")
        names = [str(name) for name, value in here.data_vars.items() if value.dims == ("t",)]
        values = {name: np.asarray(here[name].values, dtype=float) for name in names if name in KNOWN or name == "done"}
        done = values.pop("done") == 1
        found.append(Grid({"x": np.asarray(data["t"].values, dtype=float)}, values, done))
    return found


def course_of(data: xr.Dataset) -> Course:
    """The path of a stored trajectory on its principal plane."""
    places = np.stack([np.asarray(data[name].values, dtype=float) for name in ("pc1", "pc2")])
    return Course(places, np.asarray(data["plane_loss"].values, dtype=float), tuple(map(str, data["name"].values)))


def _course_over(data: xr.Dataset, axes: Mapping[str, np.ndarray], loss: np.ndarray) -> Course:
    """A stored path with the loss of the surface under it, bilinear between grid points, NaN beyond them."""
    from scipy.interpolate import RegularGridInterpolator

    places = np.stack([np.asarray(data[name].values, dtype=float) for name in ("path_x", "path_y")])
    between = RegularGridInterpolator((axes["x"], axes["y"]), loss, bounds_error=False)
    names = tuple(map(str, data["path_name"].values)) if "path_name" in data else ()
    return Course(places, np.asarray(between(places.T)), names)


def ascending(axes: Sequence[np.ndarray]) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Axes in ascending order with an exact zero, and the index that brings arrays over them into that order."""
    orders = [np.argsort(axis, kind="stable") for axis in axes]
    sorted_axes = [axis[order] for axis, order in zip(axes, orders, strict=True)]
    exact = [np.where(np.abs(a) < 1e-12 * np.ptp(a), 0.0, a) for a in sorted_axes]
    return exact, np.ix_(*orders)

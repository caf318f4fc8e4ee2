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
class Grid:
    """Numbers over the points of a plane (or of a line, without y), in float64.

    Args:
        axes: x and y, or x alone, ascending; zero exactly zero.
        values: name -> array over the axes; NaN where nothing is known.
        done: 1 where a point has been evaluated, whatever came out.
        facts: what else the file says.
        name: what tells several grids of one file apart.
    """

    axes: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    done: np.ndarray
    facts: Mapping[str, str | float] = field(default_factory=dict)
    name: str = ""


def grid_of(data: xr.Dataset) -> Grid:
    """A stored surface as a grid."""
    names = [str(name) for name, value in data.data_vars.items() if value.dims in (("x", "y"), ("y", "x"))]
    values = {name: np.asarray(data[name].transpose("x", "y").values, dtype=float) for name in names}
    done = values.pop("done") == 1
    axes = {axis: np.asarray(data[axis].values, dtype=float) for axis in ("x", "y")}
    return Grid(axes, values, done, facts={key: data.attrs[key] for key in ("l2_definition",) if key in data.attrs})


def ascending(axes: Sequence[np.ndarray]) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Axes in ascending order with an exact zero, and the index that brings arrays over them into that order."""
    orders = [np.argsort(axis, kind="stable") for axis in axes]
    sorted_axes = [axis[order] for axis, order in zip(axes, orders, strict=True)]
    exact = [np.where(np.abs(a) < 1e-12 * np.ptp(a), 0.0, a) for a in sorted_axes]
    return exact, np.ix_(*orders)

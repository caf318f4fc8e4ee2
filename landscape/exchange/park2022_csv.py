"""Read and write the CSV format of the published surfaces of Park & Kim 2022, Fig. 1a: no header, a line per point."""

import csv
from pathlib import Path

import numpy as np

from landscape.exchange.grid import Grid, ascending, table_rows
from landscape.results.declared_size import EXPANSION

# column -> name in the results file
COLUMNS = {
    "x": "x", "y": "y", "l1": "l1", "l2": "l2", "NLL": "loss", "cutoff1": "cutoff1", "cutoff2": "cutoff2",
    "acc": "accuracy", "acc-90": "accuracy_90", "unc": "unc", "unc-90": "unc_90", "IoU": "iou", "IoU-90": "iou_90",
    "freq": "freq", "freq-90": "freq_90", "top-5": "top5", "Brier": "brier", "ECE": "ece", "ECSE": "ecse",
}  # fmt: skip
SLACK = 10_000  # points of a grid below which it may be nearly empty
WEIGHT_DECAY = 0.05  # of the published figure, whose height is NLL + weight decay x l2


def read_surface(path: Path, *, weight_decay: float = WEIGHT_DECAY) -> Grid:
    """The surface, with `objective` = loss + weight decay x l2, which is what the published figure shows.

    Raises:
        ValueError: a line cannot be parsed, or the points are not a grid.
    """
    rows = []
    for number, row in table_rows(path):
        if not row:
            continue
        if len(row) != len(COLUMNS):
            wanted = f"the {len(COLUMNS)} of a published surface: {', '.join(COLUMNS)}"
            raise ValueError(f"{path} has {len(row)} columns in line {number}, expected {wanted}")
        try:
            rows.append([float(value) for value in row])
        except ValueError as error:
            what = f"a value that is not a number in line {number} ({error})"
            raise ValueError(f"{path} has {what}; expected no header") from None
    if not rows:
        raise ValueError(f"{path} is empty, expected one line per point of a surface")
    table = np.array(rows)
    axes, places = zip(*(np.unique(table[:, i], return_inverse=True) for i in (0, 1)), strict=True)
    if min(map(len, axes)) < 2 or not np.isfinite(table[:, :2]).all():
        raise ValueError(f"{path} has {len(axes[0])} x {len(axes[1])} points, expected a grid of at least 2 x 2")
    if len(axes[0]) * len(axes[1]) > EXPANSION * len(rows) + SLACK:
        raise ValueError(
            f"{path} has {len(rows):,} points at {len(axes[0]):,} x {len(axes[1]):,} coordinates, expected a "
            "grid; give a surface whose points share their coordinates"
        )
    done = np.zeros(tuple(map(len, axes)), bool)
    if len(set(zip(*places, strict=True))) < len(rows):
        raise ValueError(f"{path} has a point twice; expected one line per point of a surface")
    done[places] = True
    values = {name: np.full(done.shape, np.nan) for name in list(COLUMNS.values())[2:]}
    for array, column in zip(values.values(), table.T[2:], strict=True):
        array[places] = column
    values["loss_se"] = np.full(done.shape, np.nan)
    values["objective"] = values["loss"] + weight_decay * values["l2"]
    exact, _ = ascending(axes)
    facts: dict[str, str | float] = {"l2_definition": "park2022", "weight_decay": weight_decay}
    return Grid(dict(zip(("x", "y"), exact, strict=True)), values, done, facts)


def write_surface(path: Path, grid: Grid) -> None:
    """Write the finished points, x fastest; columns that the surface lacks are nan."""
    unknown = np.full(grid.done.shape, np.nan)
    x, y = np.meshgrid(grid.axes["x"], grid.axes["y"], indexing="ij")
    known = {**grid.values, "x": x, "y": y}
    if grid.facts.get("l2_definition") != "park2022":
        known["l2"] = unknown  # another definition: half the squared norm
    table = np.stack([known.get(name, unknown).T[grid.done.T] for name in COLUMNS.values()], axis=1)
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows(table.tolist())

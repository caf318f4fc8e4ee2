"""Write VTK XML files (.vtp) for ParaView: surfaces as meshes, lines and trajectories as curves."""

from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from landscape.exchange.grid import Grid, ProjectedTrajectory


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

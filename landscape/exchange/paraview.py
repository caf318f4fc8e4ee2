"""For ParaView: surfaces as meshes, lines and paths as curves, as VTK XML (.vtp); meshes as legacy files (.vtk)."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from landscape.exchange.grid import Course, Grid

Mesh = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]


def write_vtp(path: Path, grid: Grid) -> None:
    """Write a surface as polygons, a line as a curve, with all quantities at their points; the height is the loss."""
    if "y" in grid.axes:
        points, quads, values = mesh(grid)
        _write(path, points, values, polygons=quads)
        return
    loss = grid.values["loss"]
    known = grid.done & np.isfinite(loss)
    points = np.column_stack([grid.axes["x"][known], np.zeros(known.sum()), loss[known]])
    _write(path, points, _complete({name: column[known] for name, column in grid.values.items()}))


def write_course(path: Path, course: Course) -> None:
    """Write the path of a run as a curve on its surface, without snapshots whose loss on the plane is not known."""
    known = np.isfinite(course.loss)
    points = np.column_stack([*course.places[:, known], course.loss[known]])
    _write(path, points, {"loss": course.loss[known], "snapshot": np.flatnonzero(known).astype(float)})


def _complete(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column for name, column in values.items() if np.isfinite(column).all()}


def _write(
    path: Path, points: np.ndarray, values: dict[str, np.ndarray], *, polygons: np.ndarray | None = None
) -> None:
    """Polygons between the points, or without any the curve through them in their order."""
    cells = np.arange(len(points))[None] if polygons is None else polygons
    kind, ends = "Polys" if polygons is not None else "Lines", cells.shape[1] * np.arange(1, len(cells) + 1)
    arrays = "\n".join(_array(name, column) for name, column in values.items())
    counts = " ".join(
        f'NumberOf{name}="{len(cells) if name == kind else 0}"' for name in ("Verts", "Lines", "Strips", "Polys")
    )
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


def write_vtk(path: Path, grid: Grid) -> None:
    """The same mesh in the legacy format, which older readers take."""
    points, quads, values = mesh(grid)
    cells = np.column_stack([np.full(len(quads), 4), quads])
    lines = ["# vtk DataFile Version 3.0", "loss surface", "ASCII", "DATASET POLYDATA", f"POINTS {len(points)} double"]
    lines += [_text(points), f"POLYGONS {len(quads)} {cells.size}", _text(cells), f"POINT_DATA {len(points)}"]
    for name, column in values.items():
        lines += [f"SCALARS {name} double 1", "LOOKUP_TABLE default", _text(column)]
    path.write_text("\n".join(lines) + "\n")


def mesh(grid: Grid) -> Mesh:
    """Points (n, 3), quadrilaterals between finished neighbours (m, 4), and the quantities at the points.

    Points without a finite loss are left out, as are the cells at them: a mesh has no place for infinity. The decimal
    logarithm of the loss comes along where it exists, for surfaces that span orders of magnitude.
    """
    loss = grid.values["loss"]
    known = grid.done & np.isfinite(loss)
    number = np.full(loss.shape, -1)
    number[known] = np.arange(known.sum())
    x, y = np.meshgrid(grid.axes["x"], grid.axes["y"], indexing="ij")
    corners = np.stack([number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]], axis=-1).reshape(-1, 4)
    points = np.column_stack([x[known], y[known], loss[known]])
    values = {name: column[known] for name, column in grid.values.items()}
    values = _complete(values)
    if (loss[known] > 0).all():
        values["log10_loss"] = np.log10(loss[known])
    return points, corners[(corners >= 0).all(axis=1)], values


def _array(name: str, values: np.ndarray, kind: str = "Float64") -> str:
    components = f' NumberOfComponents="{values.shape[1]}"' if name == "points" else ""
    return f'<DataArray type="{kind}" Name={quoteattr(name)}{components} format="ascii">\n{_text(values)}\n</DataArray>'


def _text(values: np.ndarray) -> str:
    return "\n".join(" ".join(map(repr, row)) for row in np.atleast_2d(values.T).T.tolist())

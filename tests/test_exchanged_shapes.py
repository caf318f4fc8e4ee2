"""Meshes and curves for 3D viewers hold every quantity of their results, and paths go to another tool and back."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from analytic import attention_net, state
from scipy.interpolate import RegularGridInterpolator
from test_exchange import X, Y, imported, loss_at, made_by_its_tool, only, projection
from torch import nn

import landscape
from landscape.exchange import exporting, tomgoldstein
from landscape.exchange.exporting import export
from landscape.exchange.grid import Grid, ProjectedTrajectory
from landscape.plots import drawing
from landscape.probes.line import Line
from landscape.probes.trajectory import Trajectory
from landscape.results import reader as results_reader
from landscape.running.run import run


def _small(**changed: np.ndarray) -> Grid:
    x, y = np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0])
    loss = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return Grid({"x": x, "y": y}, {"loss": loss, "accuracy": loss / 10, **changed}, np.ones((3, 2), bool))


def _vtp(path: Path, kind: str = "Lines", count: int = 1) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Points (points, 3), the indices that join them into polygons (count, corners) or a line, and values by name."""
    piece = ElementTree.parse(path).getroot().find("PolyData/Piece")
    assert piece is not None

    def numbers(where: str) -> dict[str, np.ndarray]:
        return {str(a.get("Name")): np.array(str(a.text).split(), float) for a in piece.findall(f"{where}/DataArray")}

    points, joined = numbers("Points")["points"].reshape(-1, 3), numbers(kind)["connectivity"].reshape(count, -1)
    declared = [piece.get(f"NumberOf{name}", "0") for name in ("Points", "Lines", "Polys")]
    assert declared == [str(len(points)), *(str(count * (name == kind)) for name in ("Lines", "Polys"))]
    assert numbers(kind)["offsets"].tolist() == [joined.shape[1] * (i + 1) for i in range(count)]
    return points, joined, numbers("PointData")


def test_polygons_join_neighbours_and_carry_every_quantity(tmp_path: Path) -> None:
    (tmp_path / "s.vtp").write_bytes(exporting.vtp(_small()))
    points, quads, values = _vtp(tmp_path / "s.vtp", "Polys", 2)
    np.testing.assert_array_equal(points[:, 2], values["loss"])
    found = {tuple(point[:2]): point[2] for point in points}
    assert found == {(0, 0): 1, (0, 2): 2, (1, 0): 3, (1, 2): 4, (3, 0): 5, (3, 2): 6}
    areas = [np.ptp(points[quad.astype(int)][:, 0]) * np.ptp(points[quad.astype(int)][:, 1]) for quad in quads]
    assert sorted(areas) == [2.0, 4.0]
    np.testing.assert_allclose(values["accuracy"], values["loss"] / 10)
    np.testing.assert_allclose(values["log10_loss"], np.log10(values["loss"]))


def test_points_without_a_finite_loss_leave_a_hole() -> None:
    grid = _small()
    grid.values["loss"][0, 0] = np.inf
    points, quads, values = exporting.mesh(grid)
    assert (len(points), len(quads)) == (5, 1)
    assert np.isfinite(points).all()
    assert (points[quads[0]][:, 0] >= 1).all()
    assert all(len(column) == 5 for column in values.values())


def test_a_mesh_opens_in_vtk(tmp_path: Path) -> None:
    vtk = pytest.importorskip("vtk")
    (tmp_path / "s.vtp").write_bytes(exporting.vtp(_small()))
    reader = vtk.vtkXMLPolyDataReader()
    reader.SetFileName(str(tmp_path / "s.vtp"))
    reader.Update()
    mesh = reader.GetOutput()
    assert (mesh.GetNumberOfPoints(), mesh.GetNumberOfCells()) == (6, 2)
    assert mesh.GetPointData().GetArray("accuracy").GetTuple1(5) == pytest.approx(0.6)
    assert mesh.GetPoint(5) == (3.0, 2.0, 6.0)


@pytest.mark.slow
def test_a_path_comes_over_its_surface_and_goes_back(tmp_path: Path) -> None:
    x, y = [0.9, 0.4, 0.0, 5.0], [0.5, 0.5, 0.0, 0.0]
    path = projection(tmp_path / "s_proj.h5", x, y)
    (outcome,) = imported(made_by_its_tool(tmp_path / "s.h5"), tmp_path / "r.h5", trajectory=path)
    (bare,) = imported(tmp_path / "s.h5", tmp_path / "r.h5")
    assert outcome.group != bare.group
    data = dict(results_reader.groups(tmp_path / "r.h5"))[outcome.group]
    assert (data["path_x"].values.tolist(), data["path_y"].values.tolist()) == (x, y)
    assert [file.stem for file in drawing.draw(tmp_path / "r.h5", tmp_path, figures=("path",))] == ["path"]
    written = export(tmp_path / "r.h5", tmp_path / "out", ["tomgoldstein", "vtp"])
    (back,) = (file for file in written if file.name.endswith("_proj.h5"))
    with h5py.File(back) as file:
        assert (file["proj_xcoord"][()].tolist(), file["proj_ycoord"][()].tolist()) == (x, y)
    (curve,) = (file for file in written if file.name.endswith("-path.vtp"))
    points, lines, values = _vtp(curve)
    assert lines.tolist() == [[0, 1, 2]]  # the last snapshot lies outside
    np.testing.assert_allclose(points[:, :2], np.stack([x, y], axis=1)[:3])
    heights = RegularGridInterpolator((X, Y), np.array([[loss_at(a, b) for b in Y] for a in X]))(points[:, :2])
    np.testing.assert_allclose(points[:, 2], heights)
    np.testing.assert_array_equal(values["snapshot"], [0, 1, 2])


def test_data_of_one_part_have_the_names_that_tool_reads(tmp_path: Path) -> None:
    subject = landscape.load(nn.Linear(3, 2), data=(torch.eye(3), torch.tensor([0, 1, 0])), label="ours")
    found = landscape.measure("line", subject, out=tmp_path / "r.h5", quiet=True, resolution=3)
    (written,) = export(tmp_path / "r.h5", tmp_path, ["tomgoldstein"])
    (grid,) = tomgoldstein.read_surface(written)
    np.testing.assert_array_equal(grid.values["loss"], found["loss"][0])


@pytest.mark.slow
def test_lines_go_to_that_tool_and_come_back(tmp_path: Path) -> None:
    run(Line(directions=2, resolution=5), attention_net(), tmp_path / "r.h5", label="ours")
    data = only(tmp_path / "r.h5", "line")
    written = export(tmp_path / "r.h5", tmp_path / "out", ["tomgoldstein", "vtp", "csv"])
    assert [path.name.rpartition("-")[2] for path in written] == ["0.h5", "1.h5", "0.vtp", "1.vtp"]
    for k, path in enumerate(written[:2]):
        with h5py.File(path) as file:
            assert "ycoordinates" not in file
        (grid,) = tomgoldstein.read_surface(path)
        np.testing.assert_array_equal(grid.values["loss"], data["loss"].sel(direction=k))
        np.testing.assert_allclose(grid.values["accuracy"], data["accuracy"].sel(direction=k), rtol=1e-15)
        points, _, values = _vtp(written[2 + k])
        np.testing.assert_array_equal(points[:, 0], data["t"])
        np.testing.assert_array_equal(values["loss"], data["loss"].sel(direction=k))
        np.testing.assert_array_equal(values["loss_se"], data["loss_se"].sel(direction=k))
    with pytest.raises(ValueError, match="no surface that csv can hold"):
        export(tmp_path / "r.h5", tmp_path / "out", ["csv"])


@pytest.mark.slow
def test_a_trajectory_goes_to_that_tool_with_its_principal_coordinates(tmp_path: Path) -> None:
    subject = attention_net()
    folder = tmp_path / "run"
    folder.mkdir()
    for epoch in range(4):
        moved = {n: t + 0.1 * epoch**k * torch.ones_like(t) for k, (n, t) in enumerate(state(subject.model).items(), 1)}
        torch.save(moved, folder / f"epoch_{epoch}.pt")
    run(Trajectory(run=str(folder)), subject, tmp_path / "r.h5", label="ours")
    data = only(tmp_path / "r.h5", "trajectory")
    path, curve = export(tmp_path / "r.h5", tmp_path / "out", ["tomgoldstein", "vtp"])
    np.testing.assert_array_equal(tomgoldstein.read_trajectory(path).positions, [data["pc1"], data["pc2"]])
    points, _, _ = _vtp(curve)
    np.testing.assert_array_equal(points[:, 2], data["plane_loss"])


def test_curves_open_in_vtk(tmp_path: Path) -> None:
    vtk = pytest.importorskip("vtk")
    trajectory = ProjectedTrajectory(np.array([[0.0, 1.0, 2.0], [0.0, -1.0, 0.5]]), np.array([3.0, 2.0, 1.0]))
    (tmp_path / "c.vtp").write_bytes(exporting.vtp_of_trajectory(trajectory))
    reader = vtk.vtkXMLPolyDataReader()
    reader.SetFileName(str(tmp_path / "c.vtp"))
    reader.Update()
    mesh = reader.GetOutput()
    assert (mesh.GetNumberOfPoints(), mesh.GetNumberOfLines(), mesh.GetNumberOfPolys()) == (3, 1, 0)
    assert mesh.GetPoint(1) == (1.0, -1.0, 2.0)
    assert mesh.GetPointData().GetArray("snapshot").GetTuple1(2) == 2.0

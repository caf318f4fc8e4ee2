"""Files of other tools: what is read is what they hold, what is written is what they would read."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analytic import attention_net, batches_of, convolution_net, run_probe
from command_line import Command
from torch import nn

import landscape
from landscape import models
from landscape.exchange import csv_files, importing, tomgoldstein
from landscape.exchange.exporting import export
from landscape.exchange.grid import grid_of
from landscape.plots import drawing, headlines
from landscape.probes.line import Line
from landscape.probes.surface import Surface
from landscape.results import reader as results_reader
from landscape.running.run import reduce_of, run
from landscape.subject.subject import Subject
from landscape.weight_space.planes import plane_of

PUBLISHED = Path(os.environ.get("LANDSCAPE_TEST_DATA") or Path(__file__).parents[1] / "../shared/data")
RESNET, VIT = "cifar100_resnet_dnn_50_losslandscape", "cifar100_vit_ti_losslandscape"
X, Y = np.linspace(-1, 1, 5), np.linspace(-2, 1, 4)

imported = partial(importing.import_file, reduce_of=reduce_of)


def loss_at(x: float, y: float) -> float:
    return 1 + x**2 + 3 * y**2 + x * y  # not symmetric: a transposed grid would show


def made_by_its_tool(path: Path, *, x: np.ndarray = X, y: np.ndarray | None = Y, filled: int | None = None) -> Path:
    """A surface file as tomgoldstein/loss-landscape fills it: a (nx, ny) array by the flat index of a (ny, nx) mesh."""
    with h5py.File(path, "w") as file:
        file["dir_file"] = "some/where/directions.h5"
        file["xcoordinates"] = x
        shape: tuple[int, ...] = x.shape
        points = [(value, 0.0) for value in x]
        if y is not None:
            file["ycoordinates"] = y
            shape = (len(x), len(y))
            columns, rows = np.meshgrid(x, y)
            points = list(zip(columns.ravel(), rows.ravel(), strict=True))
        losses, accuracies = -np.ones(shape), -np.ones(shape)
        for index, (a, b) in list(enumerate(points))[:filled]:
            losses.ravel()[index] = loss_at(a, b)
            accuracies.ravel()[index] = 90 - 5 * a + b
        file["train_loss"], file["train_acc"] = losses, accuracies
    return path


def published_csv(path: Path, **changed: float) -> Path:
    """19 columns, no header, x fastest, as the published files."""
    lines = []
    for y in Y:
        for x in X:
            row = dict.fromkeys(csv_files.COLUMNS, 0.25) | {"x": x, "y": y, "NLL": loss_at(x, y), "l2": 2000 + 40 * x}
            lines.append(",".join(str(float(value)) for value in {**row, "acc": 0.5 + x / 10, **changed}.values()))
    path.write_bytes(("\r\n".join(lines) + "\r\n").encode())
    return path


def only(path: Path, probe: str = "surface") -> Any:
    ((_, data),) = results_reader.find(path, probe)
    return data


# --- tomgoldstein/loss-landscape ---


@pytest.mark.parametrize("shape", [(5, 5), (5, 4), (3, 7)])
def test_every_value_comes_to_its_own_coordinates(tmp_path: Path, shape: tuple[int, int]) -> None:
    x, y = np.linspace(-1, 1, shape[0]), np.linspace(-2, 1, shape[1])
    imported(made_by_its_tool(tmp_path / "s.h5", x=x, y=y), tmp_path / "r.h5", label="theirs")
    data = only(tmp_path / "r.h5")
    np.testing.assert_allclose(data["loss"].transpose("x", "y"), [[loss_at(a, b) for b in y] for a in x])
    np.testing.assert_allclose(data["accuracy"].transpose("x", "y"), [[(90 - 5 * a + b) / 100 for b in y] for a in x])
    assert (data.attrs["label"], data.attrs["source"], data.attrs["dir_file"]) == ("theirs", "s.h5", "directions.h5")
    assert data.attrs["l2_definition"] == "not in the file"
    assert data["done"].values.all()
    np.testing.assert_array_equal(data["x"], x)


def test_points_that_were_not_evaluated_are_not_finished(tmp_path: Path) -> None:
    imported(made_by_its_tool(tmp_path / "s.h5", filled=7), tmp_path / "r.h5")
    data = only(tmp_path / "r.h5")
    assert int(data["done"].sum()) == 7
    assert np.isnan(data["loss"].values[data["done"].values == 0]).all()
    np.testing.assert_array_equal(data["done"].transpose("y", "x").values.ravel()[:7], 1)  # x fastest
    assert data.attrs["finished"] == ""


@pytest.mark.slow
def test_a_file_without_y_is_a_line(tmp_path: Path) -> None:
    imported(made_by_its_tool(tmp_path / "s.h5", y=None), tmp_path / "r.h5")
    data = only(tmp_path / "r.h5", "line")
    np.testing.assert_allclose(data["loss"].sel(direction=0), [loss_at(x, 0.0) for x in X])
    np.testing.assert_array_equal(data["t"], X)
    assert [path.stem for path in drawing.draw(tmp_path / "r.h5", tmp_path)] == ["line"]


def test_both_splits_and_eigenvalues_are_taken(tmp_path: Path) -> None:
    path = made_by_its_tool(tmp_path / "s.h5")
    with h5py.File(path, "r+") as file:
        file["test_loss"], file["test_acc"] = file["train_loss"][()] + 1, file["train_acc"][()]
        file["min_eig"], file["max_eig"] = -file["train_loss"][()], file["train_loss"][()]
    imported(path, tmp_path / "r.h5")
    train, test = (data for _, data in sorted(results_reader.find(tmp_path / "r.h5"), key=lambda item: -len(item[1])))
    assert [train.attrs["label"], test.attrs["label"]] == ["s-train", "s-test"]
    np.testing.assert_array_equal(test["loss"], train["loss"] + 1)
    np.testing.assert_array_equal(train["min_eig"], -train["loss"])
    assert "max_eig" not in test


@pytest.mark.parametrize("known", [0, 2])
def test_placeholders_of_eigenvalues_are_none(tmp_path: Path, known: int) -> None:
    path = made_by_its_tool(tmp_path / "s.h5")
    with h5py.File(path, "r+") as file:
        for name, begun in (("min_eig", 1.0), ("max_eig", -1.0)):
            file[name] = np.full(file["train_loss"].shape, begun)
            file[name][0, :known] = 7.0
    imported(path, tmp_path / "r.h5")
    data = only(tmp_path / "r.h5")
    assert ("min_eig" in data, "max_eig" in data) == (bool(known), bool(known))
    for name in ("min_eig", "max_eig") if known else ():
        assert np.sort(data[name].values.ravel())[:known].tolist() == [7.0] * known
        assert int(np.isnan(data[name]).sum()) == data["loss"].size - known


def test_descending_coordinates_and_an_almost_zero_are_put_right(tmp_path: Path) -> None:
    x = np.array([1.0, 0.5, 1e-17, -0.5, -1.0])
    imported(made_by_its_tool(tmp_path / "s.h5", x=x), tmp_path / "r.h5")
    data = only(tmp_path / "r.h5")
    assert data["x"].values.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    np.testing.assert_allclose(data["loss"].transpose("x", "y"), [[loss_at(a, b) for b in Y] for a in data["x"]])


def test_a_surface_written_for_that_tool_is_drawn_by_it_and_reads_back(tmp_path: Path) -> None:
    imported(made_by_its_tool(tmp_path / "s.h5", filled=13), tmp_path / "r.h5")
    (written,) = export(tmp_path / "r.h5", tmp_path / "out", ["tomgoldstein"])
    with h5py.File(written) as file:
        assert {"dir_file", "xcoordinates", "ycoordinates", "train_loss", "train_acc"} == set(file)
        meshes = np.meshgrid(file["xcoordinates"][()], file["ycoordinates"][()])  # what its figures do
        values = file["train_loss"][()]
    assert values.shape == meshes[0].shape
    expected = np.vectorize(loss_at)(*meshes)
    expected.ravel()[13:] = -1
    np.testing.assert_allclose(values, expected)
    (back,) = tomgoldstein.read_surface(written)
    before = grid_of(only(tmp_path / "r.h5"))
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(back.values[name], before.values[name])
    np.testing.assert_array_equal(back.done, before.done)


# --- directions of tomgoldstein/loss-landscape ---


def write_directions(path: Path, **directions: list[np.ndarray]) -> str:
    with h5py.File(path, "w") as file:
        for name, arrays in directions.items():
            for i, values in enumerate(arrays):
                file[f"{name}/{i}"] = values
    return str(path)


def _resnet() -> Subject:
    torch.manual_seed(0)
    model = models.build("resnet_demo", classes=10, image_size=8, blocks=(1, 1), width=8)
    batches = [(inputs.float(), targets) for inputs, targets in batches_of((3, 8, 8), (8, 5), 10)]
    with torch.no_grad():
        model(batches[0][0])
    return Subject(model.eval(), batches)


def _theirs(model: nn.Module, seed: int) -> list[np.ndarray]:
    """A random direction normalised per filter, nothing for tensors of one dimension (`--xignore biasbn`)."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for p in model.parameters():
        d = torch.randn(p.shape, generator=generator)
        if d.dim() <= 1:
            d.fill_(0)
        else:
            for one, weight in zip(d, p.detach(), strict=True):
                one.mul_(weight.norm() / (one.norm() + 1e-10))
        found.append(d.numpy())
    return found


def test_the_plane_of_a_direction_file_has_the_losses_of_its_tool(tmp_path: Path) -> None:
    subject = _resnet()
    directions = [_theirs(subject.model, seed) for seed in (1, 2)]
    file = write_directions(tmp_path / "d.h5", xdirection=directions[0], ydirection=directions[1])
    found = run_probe(Surface(plane=file, resolution="5,3"), subject)
    weights = [p.detach().clone() for p in subject.model.parameters()]
    for i, x in enumerate(found["x"]):
        for j, y in enumerate(found["y"]):
            for p, w, dx, dy in zip(subject.model.parameters(), weights, *directions, strict=True):
                p.data = w + torch.tensor(dx * x + dy * y, dtype=torch.float32)
            total = right = count = 0.0
            with torch.no_grad():
                for inputs, targets in subject.batches:
                    outputs = subject.model(inputs)
                    total += F.cross_entropy(outputs, targets).item() * len(targets)
                    right += float((outputs.argmax(1) == targets).sum())
                    count += len(targets)
            assert found["loss"][i, j] == pytest.approx(total / count, rel=1e-5)
            assert found["accuracy"][i, j] == pytest.approx(right / count)
    assert np.ptp(found["loss"]) > 0.1


def test_directions_over_the_whole_state_are_taken_if_they_leave_buffers_alone(tmp_path: Path) -> None:
    subject = convolution_net()
    by_name = {name: np.random.default_rng(i).normal(size=tuple(p.shape))
               for i, (name, p) in enumerate(subject.parameters.items())}  # fmt: skip
    state = subject.model.state_dict()
    entries = [by_name.get(name, np.zeros(tuple(tensor.shape))) for name, tensor in state.items()]
    whole = write_directions(tmp_path / "s.h5", xdirection=entries, ydirection=entries[::-1][::-1])
    few = write_directions(tmp_path / "w.h5", xdirection=list(by_name.values()))
    plane = plane_of(subject, whole, normalize="filter", ignore="", seed=0)
    assert set(plane.directions[0]) == set(by_name)
    line = run_probe(Line(along=few, resolution=3), subject)
    surface = run_probe(Surface(plane=whole, resolution="3", range="-1:1,-2:2"), subject)
    np.testing.assert_allclose(line["loss"][0], surface["loss"][:, 1], rtol=1e-12)
    assert line["name"].tolist() == ["xdirection of w.h5"]
    moved = [np.ones_like(values) for values in entries]
    with pytest.raises(ValueError, match=r"moves 1.running_mean, which is not a parameter; .*--dir_type weights"):
        plane_of(subject, write_directions(tmp_path / "b.h5", xdirection=moved), normalize="filter", ignore="", seed=0)


def test_directions_of_another_model_name_the_first_that_does_not_fit(tmp_path: Path) -> None:
    subject = attention_net()
    arrays = [np.ones(tuple(p.shape)) for p in subject.model.parameters()]
    wrong = [*arrays[:2], np.ones((9, 9)), *arrays[3:]]
    name = list(subject.parameters)[2]
    cases = {
        write_directions(tmp_path / "a.h5", xdirection=wrong): rf"xdirection/2 is \(9, 9\), expected \(.*\) of {name}",
        write_directions(tmp_path / "b.h5", xdirection=arrays[1:]): rf"has {len(arrays) - 1} tensors in xdirection",
        write_directions(tmp_path / "c.h5", xdirection=arrays): "holds one direction, a plane needs two",
        write_directions(tmp_path / "d.h5", other=arrays): "holds no xdirection, got other",
    }
    for file, said in cases.items():
        with pytest.raises(ValueError, match=said):
            Surface(plane=file).plan(subject)
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(ValueError, match=r"text.txt is not an HDF5 file"):
        Surface(plane=str(tmp_path / "text.txt")).plan(subject)


# --- the published CSV ---


def test_columns_come_under_their_names_and_go_back_byte_for_byte(tmp_path: Path) -> None:
    source = published_csv(tmp_path / "vit.csv")
    imported(source, tmp_path / "r.h5")
    data = only(tmp_path / "r.h5")
    np.testing.assert_array_equal(data["loss"].transpose("x", "y"), [[loss_at(x, y) for y in Y] for x in X])
    np.testing.assert_array_equal(data["l2"].transpose("x", "y"), [[2000 + 40 * x] * len(Y) for x in X])
    np.testing.assert_array_equal(data["accuracy"].transpose("x", "y"), [[0.5 + x / 10] * len(Y) for x in X])
    np.testing.assert_array_equal(data["objective"], data["loss"] + 0.05 * data["l2"])
    assert (data.attrs["source"], data.attrs["l2_definition"]) == ("vit.csv", "park2022")
    (written,) = export(tmp_path / "r.h5", tmp_path / "out", ["csv"])
    assert written.read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_the_weight_decay_of_the_objective_can_be_given(tmp_path: Path) -> None:
    for decay in (0.0, 0.1):
        imported(published_csv(tmp_path / "v.csv"), tmp_path / f"{decay}.h5", weight_decay=decay)
        data = only(tmp_path / f"{decay}.h5")
        np.testing.assert_array_equal(data["objective"], data["loss"] + decay * data["l2"])


@pytest.mark.slow
def test_a_csv_of_our_own_surface_leaves_out_what_has_another_definition(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    run(Surface(resolution="3", l2_definition="park2022"), attention_net(), path, label="park")
    run(Surface(resolution="3"), attention_net(), path, label="ours")
    for label, known in {"park": True, "ours": False}.items():
        (file,) = export(path, tmp_path, ["csv"], label=label)
        grid, data = csv_files.read_surface(file), only_of(path, label)
        np.testing.assert_array_equal(grid.values["loss"], data["loss"])
        assert np.isfinite(grid.values["l2"]).all() == known
        assert np.isnan(grid.values["brier"]).all()


def only_of(path: Path, label: str) -> Any:
    ((_, data),) = results_reader.find(path, "surface", label)
    return data


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("1,2,3\n", "has 3 columns in line 1, expected the 19 of a published surface: x, y, l1"),
        (",".join(csv_files.COLUMNS) + "\n", "has a value that is not a number in line 1 .*expected no header"),
        (",".join(["1"] * 19) + "\n", "has 1 x 1 points, expected a grid"),
        ("\n".join(",".join([x, y, *["1"] * 17]) for x, y in ("00", "01", "10", "11", "00")), "has a point twice"),
    ],
)
def test_what_is_no_published_surface_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        imported(tmp_path / "s.csv", tmp_path / "r.h5")
    assert not (tmp_path / "r.h5").exists()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = [PUBLISHED / f"{name}.csv" for name in (RESNET, VIT)]
    if not all(file.exists() for file in files):
        pytest.skip("the published surfaces are not here; name their folder in LANDSCAPE_TEST_DATA")
    out = tmp_path_factory.mktemp("published") / "r.h5"
    for file in files:
        imported(file, out)
    return out


@pytest.mark.parametrize(
    ("name", "loss", "objective", "lost"), [(RESNET, 2.1941, 78.904, 31), (VIT, 2.4896, 40.965, 0)]
)
def test_the_published_surfaces_have_their_published_numbers(
    both: Path, name: str, loss: float, objective: float, lost: int
) -> None:
    data = only_of(both, name)
    assert data["loss"].shape == (21, 21)
    assert data["loss"].sel(x=0.0, y=0.0).item() == pytest.approx(loss, abs=5e-5)
    least = data["objective"].argmin(("x", "y"))
    assert (data["x"][least["x"]].item(), data["y"][least["y"]].item()) == (0.0, 0.0)
    assert data["objective"].min().item() == pytest.approx(objective, abs=5e-4)
    lowest = data["loss"].argmin(("x", "y"))  # of the loss alone it was moved by fresh augmentation at every point
    place = (data["x"][lowest["x"]].item(), data["y"][lowest["y"]].item())
    assert place == pytest.approx((-0.1, 0.0), abs=1e-12)
    assert int(np.isinf(data["loss"]).sum()) == lost
    assert data["non_finite"].item() == pytest.approx(lost / 441)
    assert headlines.numbers(data)["least objective"] == pytest.approx(objective, abs=5e-4)
    assert str(headlines.with_intervals(data)["least objective"]).endswith(", at (0, 0)")


@pytest.mark.slow
def test_the_published_surfaces_draw_and_go_back_byte_for_byte(both: Path, tmp_path: Path) -> None:
    wanted = ("surface", "surface_3d", "objective")
    assert tuple(path.stem for path in drawing.draw(both, tmp_path / "figures", figures=wanted)) == wanted
    for path in export(both, tmp_path / "out", ["csv"]):
        name = path.stem.rpartition("-")[0]
        assert path.read_bytes() == (PUBLISHED / f"{name}.csv").read_bytes()


# --- ParaView ---


# --- lines and paths ---


# --- the commands ---


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_here: Command) -> Command:
    monkeypatch.chdir(tmp_path)
    return command_here


@pytest.mark.slow
def test_several_files_import_once_beside_our_own_and_draw_together(command: Command, tmp_path: Path) -> None:
    run(Surface(resolution="3"), attention_net(), tmp_path / "results.h5", label="ours")
    files = published_csv(tmp_path / "a.csv"), made_by_its_tool(tmp_path / "b.h5")
    assert command("import", *files, "--label", "one", "--label", "two")[0] == 0
    code, _, err = command("import", *files)
    assert code == 0
    assert err.count("already imported") == 2
    assert len(landscape.open(tmp_path / "results.h5")["surface"].children) == 3
    code, out, _ = command("plot", "results.h5", "--figure", "surface")
    assert code == 0
    assert "surface.png" in out
    code, out, _ = command("export", "--format", "vtp,tomgoldstein", "--label", "two")
    assert code == 0
    assert sorted(Path(line).suffix for line in out.split()) == [".h5", ".vtp"]
    assert not [path.name for path in tmp_path.rglob("*") if "partial" in path.name or "journal" in path.name]


@pytest.mark.slow
def test_bad_files_end_in_one_line_and_change_nothing(command: Command, tmp_path: Path) -> None:
    good = published_csv(tmp_path / "good.csv")
    run(Surface(resolution="2"), attention_net(), tmp_path / "results.h5", label="ours")
    before = (tmp_path / "results.h5").read_bytes()
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["weights"] = [1.0]
    with h5py.File(made_by_its_tool(tmp_path / "cut.h5"), "r+") as file:
        del file["train_loss"]
        file["train_loss"] = np.ones(7)
    path = projection(tmp_path / "s_proj.h5", [0.0, 1.0], [0.0, 1.0])
    line = made_by_its_tool(tmp_path / "line.h5", y=None)
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)))
    whole = made_by_its_tool(tmp_path / "half.h5").read_bytes()
    (tmp_path / "half.h5").write_bytes(whole[: len(whole) // 2])
    cases: Mapping[tuple[str | Path, ...], tuple[int, str]] = {
        ("import", good, "none.csv"): (1, "no file at none.csv"),
        ("import", good, "other.h5"): (1, "has no xcoordinates with a train_loss or test_loss, got weights"),
        ("import", good, "cut.h5"): (1, "has 7 values of train_loss for 5 x 4 coordinates"),
        ("import", good, "half.h5"): (1, "half.h5 is damaged"),
        ("import", good, "noise.bin"): (1, "neither HDF5 nor text"),
        ("import", good, "results.h5"): (1, "is a results file of landscape already"),
        ("import", good, tmp_path): (1, "is a folder"),
        ("import", good, "--label", "a", "--label", "b"): (2, "once per file (1), got 2"),
        ("import", good, "--weight-decay", "-1"): (2, "weight-decay"),
        ("import", path): (1, "holds the path of a run, expected a surface; give both"),
        ("import", good, "--path", "none.h5"): (1, "no file at none.h5; give a projection file"),
        ("import", good, "--path", "other.h5"): (1, "holds no proj_xcoord and proj_ycoord, got weights"),
        ("import", good, "--path", good): (1, "is not an HDF5 file; give a projection file"),
        ("import", line, "--path", path): (1, "holds a line, expected a surface under the path"),
        ("import", good, line, "--path", path): (2, "got 2 files"),
        ("export", "none.h5"): (1, "none.h5"),
        ("export", "--format", "stl"): (2, "--format must be tomgoldstein, csv or vtp, got stl"),
        ("export", "--format", "csv,vtk"): (2, "--format must be tomgoldstein, csv or vtp, got vtk"),
        ("export", "--label", "theirs"): (1, "holds no surface with the label theirs (labels: ours)"),
        ("export", "--out", "good.csv"): (1, "expected a folder"),
    }
    for words, (code, said) in cases.items():
        found, out, err = command(*words)
        assert (found, out) == (code, ""), words
        assert said in err
        assert err.count("\n") == 1
    assert (tmp_path / "results.h5").read_bytes() == before


def test_a_field_longer_than_any_is_one_line_with_the_file_s_name(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "long.csv"
    path.write_text("1" * 200_000 + ",2\n")
    code, out, err = command("import", path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"{path} is not a table (field larger than field limit" in err


def projection(path: Path, x: Sequence[float], y: Sequence[float]) -> Path:
    """The path of a run as loss-landscape keeps it."""
    with h5py.File(path, "w") as file:
        file["proj_xcoord"], file["proj_ycoord"] = x, y
    return path

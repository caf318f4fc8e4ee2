"""`plot` and `report` of files that nobody would draw on purpose: one line or a page, never a traceback."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import synthetic
from command_line import Command
from drawable import result_of
from matplotlib.figure import Figure

from landscape.plots import broken, drawing
from landscape.plots.figures import lesion
from landscape.probe import Plan, Quantity
from landscape.results.run_key import RunKey
from landscape.results.writer import Writer

HOSTILE = "größe_{模型} $\\frac{a} <script>alert(1)</script>"


def changed(path: Path, change: Callable[[h5py.Group], None]) -> Path:
    """A made-up surface of one network, changed."""
    synthetic.write(path, synthetic.NETWORKS[:1], probes=("surface",))
    with h5py.File(path, "r+") as file:
        (group,) = file["surface"].values()
        change(group)
    return path


@pytest.mark.slow
def test_an_empty_file_is_refused_in_one_line(command: Command, tmp_path: Path) -> None:
    empty = tmp_path / "empty.h5"
    with h5py.File(empty, "w"):
        pass
    nothing = tmp_path / "nothing.h5"
    nothing.touch()
    for path in (empty, nothing):
        for words in (("plot", path, "--out", tmp_path / "f"), ("report", path, "--out", tmp_path / "p.html")):
            code, _, said = command(*words)
            assert code == 1
            assert said.count("\n") == 1


@pytest.mark.slow
def test_a_surface_without_a_number_is_refused_and_one_with_infinite_cells_is_drawn(
    command: Command, tmp_path: Path
) -> None:
    def nothing(group: h5py.Group) -> None:
        for name in ("loss", "objective", "profile_mean", "profile_most"):
            group[name][...] = np.nan

    def infinite(group: h5py.Group) -> None:
        loss = group["loss"][()]
        loss[::2, ::3], loss[1, 1] = np.inf, -np.inf
        group["loss"][...] = loss

    code, _, said = command("plot", changed(tmp_path / "n.h5", nothing), "--out", tmp_path / "f")
    assert code == 1
    assert said.splitlines()[-1].startswith(f"landscape: {tmp_path / 'n.h5'} holds nothing finished to draw")
    assert "its numbers are not finite" in said
    path = changed(tmp_path / "i.h5", infinite)
    code, drawn, _ = command("plot", path, "--figure", "surface,surface_3d", "--out", tmp_path / "f")
    assert (code, [Path(line).stem for line in drawn.split()]) == (0, ["surface", "surface_3d"])


@pytest.mark.slow
def test_a_surface_of_one_point_is_drawn(command: Command, tmp_path: Path) -> None:
    out, one = tmp_path / "one.h5", np.zeros(1)
    quantities = {name: Quantity(name) for name in ("loss", "loss_se", "l2", "accuracy")}
    plan = Plan(over={"x": one, "y": one}, quantities=quantities)
    with Writer(out, RunKey("surface", "net", "0123456789", plan, {"parameters": "{}"})) as writer:
        for unit in writer.pending():
            writer.write(unit, {"loss": 1.5, "loss_se": 0.1, "l2": 1.0, "accuracy": 0.5})
    assert command("report", out, "--out", tmp_path / "p.html")[0] == 0  # which draws every figure


@pytest.mark.slow
@pytest.mark.parametrize(("count", "depth"), [(2, 10), pytest.param(6, 80, marks=pytest.mark.campaign)])
def test_many_networks_of_many_layers_with_long_names_are_drawn(count: int, depth: int, tmp_path: Path) -> None:
    networks = [synthetic.transformer(f"{HOSTILE} {i} {'long ' * 12}", depth=depth) for i in range(count)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("variance", "lesion"))
    drawn = drawing.draw(path, tmp_path, figures=("variance", "lesion"))
    assert [file.stem for file in drawn] == ["variance", "lesion"]


STREAMED = """
import resource, sys
import landscape
from landscape.cli.main import exit_code
size, path, out = int(sys.argv[1]), *sys.argv[2:]
resource.setrlimit(resource.RLIMIT_AS, (5 * 2**30, 5 * 2**30))
commands = (
    ["show", path], ["plot", path, "--out", out], ["report", path, "--out", out + ".html"], ["compare", path],
    ["animate", path, "--out", out + ".gif"],
)
codes = [exit_code(words) for words in commands]
assert exit_code(["doctor", path]) in (0, 3)
landscape.plots.surface_height(path)
assert "net 1" in landscape.compare(path)._repr_html_()
with open("/proc/self/status") as status:  # ru_maxrss would begin with the memory of the process that starts this one
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
print(codes, peak < size / 2, peak)
"""
SIZE = int(os.environ.get("GIGABYTES", "2")) * 2**30


def swollen(group: h5py.Group) -> None:
    """Add gigabytes: a hole in the file, which takes no place on the disk."""
    form = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    form.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    form.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    shape = (*group["loss"].shape, SIZE // (8 * group["loss"].size))
    h5py.h5d.create(group.id, b"samples_loss", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple(shape), form)


@pytest.mark.campaign
def test_a_file_of_gigabytes_is_streamed(tmp_path: Path) -> None:
    """Of two networks at successive epochs, so that every command has something to draw, with less memory than half."""
    path = tmp_path / "large.h5"
    networks = [synthetic.transformer(f"net {i}", model=f"net_{i}") for i in range(2)]
    synthetic.write(path, networks, probes=("surface",))
    with h5py.File(path, "r+") as file:
        for epoch, group in enumerate(file["surface"].values()):
            group.attrs.update(epoch=float(epoch), spec='{"checkpoint": "run/net.pt"}')
        swollen(group)
    assert path.stat().st_size > SIZE
    command = [sys.executable, "-c", STREAMED, str(SIZE), str(path), str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("[0, 0, 0, 0, 0] True"), ended.stdout + ended.stderr
    assert "not stored" in ended.stderr
    assert (tmp_path / "a.gif").exists()


# --- Marks in figures where numbers or errors are infinite or not numbers ---


def test_infinite_values_are_at_the_edge_and_values_without_an_error_are_crossed() -> None:
    ax = Figure().subplots()
    at, value = np.arange(5.0), np.array([1.0, np.inf, 2.0, -np.inf, np.nan])
    error = np.array([0.1, 0.1, -np.inf, np.nan, np.inf])
    ax.errorbar(at, value, broken.bar(error))
    broken.mark(ax, at, value, error)
    broken.mark(ax, at, value, error)  # of a second network
    marks = {line.get_marker(): line.get_xydata().tolist() for line in ax.lines[1:]}
    assert marks == {"x": [[2.0, 2.0]], "^": [[1.0, 1.0]], "v": [[3.0, 0.0]]}
    assert [text.get_text() for text in ax.texts] == ["× no finite error\ntriangles at the edge: infinite"]
    ax = Figure().subplots()
    broken.mark(ax, at, value, np.stack([error, np.ones(5)]), flat=True)
    marks = {line.get_marker(): line.get_xydata().tolist() for line in ax.lines}
    assert marks == {"x": [[2.0, 2.0]], ">": [[1.0, 1.0]], "<": [[0.0, 3.0]]}


@pytest.mark.slow
def test_a_removal_after_which_the_loss_is_not_a_number_is_marked(study: Path) -> None:
    data = result_of(study, "lesion").copy(deep=True)
    data["loss_increase"][:2] = [np.nan, np.inf]
    ax = lesion.bars(data, Figure().subplots(), "loss_increase", "loss")
    (marks,) = (line for line in ax.lines if line.get_marker() == "^")
    assert list(marks.get_xdata()) == [0, 1]

"""The figure of a training run, finished or not, its errors, and TensorBoard event files."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.curves import curves

pytestmark = pytest.mark.slow

TABLE = """epoch,epochs,train_loss,loss,accuracy,seconds,lr
1,5,2.0,1.9,0.3,60.0,0.001
2,5,1.5,1.6,0.5,60.0,0.0005
3,5,1.2,1.7,0.4,60.0,0.0001
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "vit_demo-digits"
    folder.mkdir()
    (folder / "metrics.csv").write_text(TABLE)
    return folder


def test_lines_are_the_columns_and_the_axis_is_the_whole_run() -> None:
    names = ("epoch", "epochs", "train_loss", "loss", "accuracy", "lr")
    columns = {name: np.array([float(i + k) for k in range(3)]) for i, name in enumerate(names)}
    columns["epochs"] = np.full(3, 10.0)
    axes = Figure().subplots(1, 3)
    curves(columns, axes)
    drawn = [[line.get_ydata().tolist() for line in ax.lines] for ax in axes]
    panels = (("train_loss", "loss"), ("accuracy",), ("lr",))
    assert drawn == [[columns[name].tolist() for name in panel] for panel in panels]
    assert all(ax.get_xlim()[1] > 10 for ax in axes)


def test_an_unfinished_run_is_drawn_and_its_progress_stated(run: Path, tmp_path: Path) -> None:
    (path,) = drawing.draw_run(run, tmp_path / "figures", ("svg",))
    words = path.read_text()
    assert "3 of 5 epochs, test accuracy 0.4000, at its highest" in words
    assert "0.5000 (epoch 2), 3.0 min" in words


def test_plot_takes_the_folder_of_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["plot", str(run), "--out", str(tmp_path / "figures"), "--format", "png,pdf"]) == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["curves.pdf", "curves.png"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "figures" / f"curves.{end}") for end in ("png", "pdf")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no metrics.csv in .*; give a results file, or a run folder"),
        (TABLE.splitlines()[0], "holds no finished epoch yet"),
        (TABLE.replace("accuracy", "acc"), "is not the table of a training run .*'accuracy'"),
        (TABLE.replace("1.7", "low"), "is not the table of a training run"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    run: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is None:
        (run / "metrics.csv").unlink()
    else:
        (run / "metrics.csv").write_text(text)
    assert exit_code(["plot", str(run), "--out", str(run / "figures")]) == 1
    words = capsys.readouterr().err
    assert words.count("\n") == 1
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        drawing.draw_run(run, run / "figures")
    assert not (run / "figures").exists()


def test_train_leaves_the_figure_and_on_request_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "vit_demo", "--data", "digits", "--fraction", "0.05", "--epochs", "2", "--quiet"]
    words += ["--model-arg", "dim=8", "--model-arg", "depth=1", "--model-arg", "heads=1", "--deterministic"]
    assert exit_code([*words, "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "tensorboard").exists()
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    assert exit_code([*words, "--out", str(tmp_path / "other"), "--tensorboard"]) == 1
    assert not (tmp_path / "other").exists()


def test_events_hold_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from landscape.cli.training import EventFiles
    from landscape.training.train import EpochResult

    write = EventFiles(tmp_path)
    for epoch in (1, 2):
        rates = {"train_loss": 2.0 / epoch, "loss": 1.0 / epoch, "accuracy": 0.25 * epoch}
        write(EpochResult(epoch, 2, **rates, seconds=1.0, lr=0.1))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("accuracy/test")] == [(1, 0.25), (2, 0.5)]
    assert [event.value for event in events.Scalars("loss/train")] == [2.0, 1.0]

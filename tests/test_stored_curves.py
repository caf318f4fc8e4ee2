"""Control points of trained curves: kept once, read by later runs and other processes, never two for one result."""

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_runs import save

from landscape.data import user_cache
from landscape.probes.line import Line
from landscape.results import reader
from landscape.running import run as runs
from landscape.running.work import measure_chunk, work_of
from landscape.subject.loading import load as loading
from landscape.subject.subject import Subject
from landscape.weight_space import bezier

DATA = """
import torch
def data(split):
    generator = torch.Generator().manual_seed(len(split))
    return torch.randn(40, 3, 16, 16, generator=generator), torch.arange(40) % 10
"""


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv(user_cache.VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "data.py").write_text(DATA)
    for seed in (0, 1):
        save(tmp_path / f"{seed}.pt", seed=seed)
    return tmp_path / "0.pt", tmp_path / "1.pt"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the steps of training."""
    made: Counter[str] = Counter()
    step = torch.optim.SGD.step

    def counted(self: torch.optim.SGD, *given: Any) -> Any:
        made["steps"] += 1
        return step(self, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    return made


def _subject(path: Path, **options: Any) -> Subject:
    data = f"{path.parent}/data.py:data"
    return loading.load(str(path), **{"data": data, "split": "test", "samples": 24, "batch_size": 8, **options})


def _curve(path: Path, **options: Any) -> Line:
    training: dict[str, Any] = {"connect": "bezier", "connect_epochs": 2, "connect_batch_size": 16}
    return Line(along=str(path), **{"resolution": 5, **training, **options})


def _stop(done: int, total: int) -> None:
    if done == 3:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_stopped_run_goes_on_along_the_same_curve_without_training_again(
    ends: tuple[Path, Path], steps: Counter[str], tmp_path: Path
) -> None:
    first, second = ends
    with pytest.raises(KeyboardInterrupt):
        runs.run(_curve(second), _subject(first), tmp_path / "parts.h5", report=_stop)
    trained = steps["steps"]
    assert trained == 2 * 3
    parts = runs.run(_curve(second), _subject(first), tmp_path / "parts.h5")
    assert (parts.measured, steps["steps"]) == (6, trained)
    finer = runs.run(_curve(second, resolution=9), _subject(first, batch_size=12), tmp_path / "parts.h5")
    assert steps["steps"] == trained  # of another question, along the same curve
    assert finer.group != parts.group
    (tmp_path / "cache").rename(tmp_path / "gone")
    whole = runs.run(_curve(second), _subject(first), tmp_path / "whole.h5")
    assert steps["steps"] == 2 * trained
    one, other = (reader.find(tmp_path / f"{name}.h5", "line") for name in ("parts", "whole"))
    same = dict(one)[whole.group]
    np.testing.assert_array_equal(same["loss"], other[0][1]["loss"])
    assert np.isfinite(same["loss"]).all()


@pytest.mark.slow
def test_another_process_measures_the_curve_that_the_first_one_trained(
    ends: tuple[Path, Path], steps: Counter[str], tmp_path: Path
) -> None:
    probe, subject = _curve(ends[1]), _subject(ends[0])
    units = list(probe.plan(subject).units())
    here = list(probe.sweep(subject, units))
    trained = steps["steps"]
    there = [values for _, values in measure_chunk(work_of(probe, subject), units)]
    assert steps["steps"] == trained > 0
    assert there == here


@pytest.mark.slow
def test_points_of_a_curve_with_other_bits_never_join_those_of_the_first(
    ends: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ends
    with pytest.raises(KeyboardInterrupt):
        runs.run(_curve(second), _subject(first), tmp_path / "r.h5", report=_stop)
    (tmp_path / "cache").rename(tmp_path / "gone")
    monkeypatch.setattr(bezier, "MOMENTUM", 0.899)  # stands for another machine
    other = runs.run(_curve(second), _subject(first), tmp_path / "r.h5")
    assert (other.measured, other.units) == (9, 9)
    assert sorted(int(data["done"].sum()) for _, data in reader.find(tmp_path / "r.h5", "line")) == [3, 9]


def test_of_two_processes_that_train_a_curve_the_first_one_gives_it_to_both(ends: tuple[Path, Path]) -> None:
    one, other = ({"weight": torch.full((3,), value)} for value in (1.0, 2.0))
    assert bezier.load("key", one) is None
    for given in (one, other):
        torch.testing.assert_close(bezier.store("key", given), one, rtol=0, atol=0)


@pytest.mark.parametrize("kept", [True, False])
def test_without_a_usable_cache_folder_curves_are_temporary_files_or_a_note_says_that_nothing_is_kept(
    kept: bool, ends: tuple[Path, Path], steps: Counter[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv(user_cache.VARIABLE, str(ends[0]) if kept else "")  # a file
    monkeypatch.setattr(tempfile, "tempdir", str(ends[0].parent))
    keys = {str(_curve(ends[1]).identity(_subject(ends[0]))) for _ in range(2)}
    assert (len(keys), steps["steps"]) == (1, 2 * 3 * (1 if kept else 2))
    assert ("name a folder by LANDSCAPE_CACHE" in caplog.text) is not kept


def test_a_disk_that_keeps_no_curve_is_named(
    ends: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "link", full)
    assert list(bezier.store("key", {"weight": torch.ones(3)})) == ["weight"]
    assert "is not kept, and is trained again by the next run: no space left" in caplog.text


def test_files_of_a_process_that_was_killed_are_removed_with_the_oldest_curves(
    ends: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(os, "link", lambda *_: _stop(3, 3))
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            bezier.store("key", {"weight": torch.ones(3)})
    place = bezier.folder()
    (left,) = place.iterdir()
    assert bezier.load("key", {"weight": torch.ones(3)}) is None
    monkeypatch.setattr(bezier, "MOST_BYTES", left.stat().st_size)
    bezier.store("other", {"weight": torch.ones(3)})
    assert [path.name for path in place.iterdir()] == ["other.pt"]


def test_a_curve_that_is_removed_while_it_is_read_is_not_called_damaged(
    ends: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_cache, "is_own", lambda path: True)
    assert bezier.load("key", {"weight": torch.ones(3)}) is None
    assert not caplog.text


@pytest.mark.parametrize("damage", ["cut", "other bits", "another network"])
def test_a_file_that_does_not_hold_the_curve_is_not_used(
    damage: str, ends: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    control = {"weight": torch.arange(3.0)}
    bezier.store("key", control)
    place = bezier.folder()
    path = place / "key.pt"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "other bits":
        torch.save({**torch.load(path), "control": {"weight": torch.ones(3)}}, path)
    like = {"weight": torch.zeros(4 if damage == "another network" else 3)}
    assert bezier.load("key", like) is None
    assert "is damaged; the curve is trained again" in caplog.text
    assert not path.exists()


def test_weights_that_are_not_trainable_stay_in_the_middle_of_the_line(ends: tuple[Path, Path]) -> None:
    subject, probe = _subject(ends[0]), _curve(ends[1])
    whole = probe._lines(subject)[0]
    part = _subject(ends[0])
    for name, parameter in part.model.named_parameters():
        parameter.requires_grad_(name.startswith("fc."))
    found = probe._lines(part)[0]
    assert whole.identity != found.identity
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in found.control.values())
    middle = {name: (p.detach() + whole.end[name]) / 2 for name, p in subject.model.named_parameters()}
    stays = [name for name, tensor in found.control.items() if torch.allclose(tensor, middle[name], atol=1e-7)]
    assert stays == [name for name in middle if not name.startswith("fc.")]


def test_data_of_one_part_and_a_training_that_diverges_are_refused_with_what_to_do(
    ends: tuple[Path, Path], tmp_path: Path
) -> None:
    np.save(tmp_path / "images.npy", np.zeros((20, 16, 16, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(20) % 10)
    subject = _subject(ends[0], data=f"{tmp_path}/images.npy,{tmp_path}/labels.npy")
    with pytest.raises(ValueError, match=r"and the data \(.*\) have one part; give data with a train and a test part"):
        _curve(ends[1]).plan(subject)
    with pytest.raises(ValueError, match=r"diverged in epoch 1 .*give a smaller --connect-rate than 1e\+20"):
        _curve(ends[1], connect_rate=1e20).plan(_subject(ends[0]))

"""`landscape train --monitor` writes a series into the run folder, changes no weight, and continues after a kill."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from test_monitor import ALL, data
from torch import nn
from torch.nn import functional as F

import landscape
from landscape.cli.main import exit_code
from landscape.monitoring.gradients import BUCKETS
from landscape.results import reader
from landscape.training import train as training
from landscape.training.training_set import splits

pytestmark = pytest.mark.slow
TRAIN = ["train", "vit_demo", "--data", "digits", "--epochs", "3", "--fraction", "0.1", "--batch-size", "32"]
TINY = ["--model-arg", "dim=12", "--model-arg", "depth=1", "--model-arg", "patch=4"]
MONITOR = ["--monitor", "--monitor-every", "2", "--monitor-overhead", "1e9"]


def weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "final.pt", weights_only=True)["state_dict"]
    return found


@pytest.mark.campaign
def test_the_weights_are_the_same_and_a_killed_run_continues_its_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([*TRAIN, *TINY, "--out", str(tmp_path / "alone")]) == 0
    assert exit_code([*TRAIN, *TINY, *MONITOR, "--out", str(tmp_path / "whole")]) == 0
    alone, whole = weights(tmp_path / "alone"), weights(tmp_path / "whole")
    assert all(torch.equal(alone[name], whole[name]) for name in alone)
    epoch = training._epoch

    def killed(run: Any, number: int, monitor: Any) -> float:
        loss = epoch(run, number, monitor)
        if number == 2:  # after its updates, before its state is written
            raise KeyboardInterrupt
        return loss

    monkeypatch.setattr(training, "_epoch", killed)
    command = [*TRAIN, *TINY, *MONITOR, "--out", str(tmp_path / "killed")]
    assert exit_code(command) == 130
    monkeypatch.undo()
    assert exit_code(command) == 0
    series = []
    for folder in ("whole", "killed"):
        ((_, data),) = reader.groups(tmp_path / folder / "monitor.h5")
        series.append(data)
    whole_series, resumed = series
    assert whole_series["step"].values.tolist() == resumed["step"].values.tolist()
    assert whole_series["step"].values.tolist() == list(range(0, int(whole_series["step"].values[-1]) + 1, 2))
    assert len(whole_series["step"]) > 5
    assert resumed["loss"].values == pytest.approx(whole_series["loss"].values, rel=1e-6)
    assert resumed["distance"].values == pytest.approx(whole_series["distance"].values, rel=0.02)
    assert np.isfinite(whole_series["preconditioned_threshold"].values[1:]).all()
    images, _ = splits("digits", root=None, fraction=0.1)  # what the protocol names, in the initial network
    assert (
        f"digits train (first 32 of the {len(images)} trained on), one mini-batch of 32 " in resumed.attrs["protocol"]
    )
    data = images.normalised(images.inputs[:32]), images.targets[:32]
    subject = landscape.load(tmp_path / "whole" / "init.pt", data=data, batch_size=32)
    found = landscape.measure("hessian", subject, out=None, quiet=True, top=1)
    assert found.loss.item() == pytest.approx(float(whole_series["loss"][0]), rel=1e-5)
    assert found.eigenvalue.item() == pytest.approx(float(whole_series["eigenvalue"][0].max()), rel=0.01)


def test_options_of_the_monitor_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([*TRAIN, "--out", str(tmp_path / "a"), "--monitor", "--monitor-every", "0"]) == 2
    assert "monitor-every must be at least 1, got 0" in capsys.readouterr().err
    words = ["--objective", "simclr", "--out", str(tmp_path / "b"), "--monitor"]
    assert exit_code([*TRAIN, *words]) == 2
    assert "--monitor follows the cross-entropy of a classifier" in capsys.readouterr().err


def run(folder: Path, start: int, end: int, *, kill: bool = False) -> None:
    """A run of a network with more weights than a sketch has buckets; it goes on from the checkpoint of step 17."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 2500), nn.Tanh(), nn.Linear(2500, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if start:
        model.load_state_dict(torch.load(folder / "at.pt"))
    inputs, targets = data()
    how: dict[str, Any] = {"every": 5, "out": folder / "run.h5", "start": start, "tol": 1e-4, **ALL}
    monitor = landscape.Monitor(model, F.cross_entropy, (inputs, targets), **how)
    for step in range(start + 1, end + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        monitor.step()
        if step == 17:
            torch.save(model.state_dict(), folder / "at.pt")
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    monitor.close()


@pytest.mark.campaign
def test_a_killed_run_continues_its_series_from_its_checkpoint(tmp_path: Path) -> None:
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    code = f"{path}; from test_monitored_training import *; run(Path('.'), 0, 33, kill=True)"
    assert forked.Popen([sys.executable, "-c", code], cwd=tmp_path).wait() == -signal.SIGKILL
    assert list(tmp_path.glob("run.h5.journal-*"))
    run(tmp_path, 17, 40)
    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole", 0, 40)
    ((_, whole),) = reader.groups(tmp_path / "whole" / "run.h5")
    ((_, killed),) = reader.groups(tmp_path / "run.h5")
    assert killed["step"].values.tolist() == whole["step"].values.tolist() == list(range(0, 41, 5))
    assert killed["loss"].values == pytest.approx(whole["loss"].values, rel=1e-6)
    assert killed["eigenvalue"].values == pytest.approx(whole["eigenvalue"].values, rel=1e-3)
    assert (killed["distance_se"].values > 0).tolist() == [False] * 4 + [True] * 5
    assert killed["distance"].values == pytest.approx(whole["distance"].values, rel=4 / math.sqrt(2 * BUCKETS))
    assert not list(tmp_path.glob("*.journal-*"))
    assert whole.attrs["finished"]

"""The pages' training loops run as shown, plain and in Lightning and transformers, and their callbacks resume."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from landscape.cli.main import exit_code
from landscape.models.libraries import library
from landscape.results import reader

PAGE = Path(__file__).parent.parent / "docs" / "monitoring.md"
PLAIN, LIGHTNING, TRANSFORMERS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def series(path: Path) -> dict[str, list[int]]:
    return {str(data.attrs["label"]): data["step"].values.tolist() for _, data in reader.groups(path)}


def installed(name: str) -> ModuleType:
    """A library, imported beside a torchvision that may be of another torch; the test is skipped without it."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}")
    return library(name)


def test_a_plain_loop_as_shown_gives_the_edge_of_stability_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN, scope)
    scope["monitor"].close()
    assert series(tmp_path / "run.h5") == {"Sequential": list(range(0, 1001, 20))}
    ((_, data),) = reader.groups(tmp_path / "run.h5")
    late = data["eigenvalue"].values[25:, 0] / data["threshold"].values[25:]  # at the edge of stability
    assert data["eigenvalue"].values[0, 0] < 0.5 * data["threshold"].values[0]
    assert 0.97 < late.mean() < 1.1
    for command in (["plot", "run.h5"], ["show", "run.h5"]):
        assert exit_code(command) == 0
    assert (tmp_path / "figures" / "monitor.png").exists()


def test_lightning_as_shown_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning: Any = installed("lightning")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN.partition("monitor =")[0], scope)
    exec(LIGHTNING, scope)
    assert series(tmp_path / "run.h5") == {"Classifier": [0, 10, 20]}
    ((_, data),) = reader.groups(tmp_path / "run.h5")
    assert np.isfinite(data["preconditioned"].values[1:]).all()
    assert data["learning_rate"].values == pytest.approx(1e-3)
    scope["trainer"].save_checkpoint("at.ckpt")  # at step 20
    again = scope["landscape"].LightningMonitor(
        scope["F"].cross_entropy, (scope["inputs"], scope["classes"]), every=10, out="run.h5", overhead=1e9
    )
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(callbacks=[again], max_epochs=10, accumulate_grad_batches=2, **quiet)
    trainer.fit(scope["Classifier"](), scope["loader"], ckpt_path="at.ckpt")
    assert series(tmp_path / "run.h5") == {"Classifier": [0, 10, 20, 30]}  # ten more updates of two batches each


def test_transformers_as_shown_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN.partition("monitor =")[0], scope)
    exec(TRANSFORMERS.replace('save_strategy="no"', 'save_strategy="steps", save_steps=5'), scope)
    assert series(tmp_path / "run.h5") == {"GPT2LMHeadModel": [0, 5, 10]}
    ((_, data),) = reader.groups(tmp_path / "run.h5")
    assert np.isfinite(data["preconditioned"].values[:, 0]).tolist() == [False, True, False]  # at last the rate is 0
    model = scope["trainer"].model
    inputs = {name: tensor for name, tensor in scope["batch"].items()}
    with torch.no_grad():
        loss = model.eval()(**inputs).loss.item()
    assert data["loss"].values[-1] == pytest.approx(loss, rel=1e-5)
    scope["trainer"].train(resume_from_checkpoint="trained/checkpoint-5")
    assert series(tmp_path / "run.h5") == {"GPT2LMHeadModel": [0, 5, 10]}

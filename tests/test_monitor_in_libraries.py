"""The pages' training loops run as shown, plain and in Lightning and transformers, and their callbacks resume."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from landscape.checkpoints.libraries import library
from landscape.cli.main import exit_code
from landscape.results import reader

ROOT = Path(__file__).parent.parent
SHOWN = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
_, PLAIN, LIGHTNING, TRANSFORMERS, *LOGGERS = SHOWN.findall((ROOT / "docs" / "monitoring.md").read_text())
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def series(path: Path) -> dict[str, list[int]]:
    return {str(data.attrs["label"]): data["step"].values.tolist() for _, data in reader.groups(path)}


def installed(name: str) -> ModuleType:
    """A library, imported beside a torchvision that may be of another torch; the test is skipped without it."""
    if find_spec(name) is None:
        pytest.skip(f"needs {name}")
    return library(name)


def ratio(path: Path, sharpness: str, threshold: str) -> np.ndarray:
    """Sharpness over its threshold at every measured step of the only run."""
    ((_, data),) = reader.groups(path)
    return np.asarray(data[sharpness].values[:, 0] / data[threshold].values)


def test_a_plain_loop_as_shown_gives_the_edge_of_stability_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN, scope)
    scope["monitor"].close()
    assert series(tmp_path / "run.h5") == {"Sequential": list(range(0, 1001, 20))}
    found = ratio(tmp_path / "run.h5", "eigenvalue", "threshold")
    assert found[0] < 0.5
    assert 0.97 < found[25:].mean() < 1.1  # at the edge of stability
    for command in (["plot", "run.h5"], ["show", "run.h5"]):
        assert exit_code(command) == 0
    assert (tmp_path / "figures" / "monitor.png").exists()


def test_lightning_as_shown_reaches_the_edge_of_adam_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning: Any = installed("lightning")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN.partition("monitor =")[0], scope)
    exec(LIGHTNING, scope)
    steps = list(range(0, 301, 10))
    assert series(tmp_path / "run.h5") == {"Regression": steps}
    found = ratio(tmp_path / "run.h5", "preconditioned", "preconditioned_threshold")
    assert found[1] < 0.4
    assert 0.95 < found[15:].mean() < 1.05
    assert scope["trainer"].callback_metrics["monitor/critical_sharpness"] > 0
    assert exit_code(["plot", "run.h5"]) == 0
    assert (tmp_path / "figures" / "monitor_preconditioned.png").exists()
    scope["trainer"].save_checkpoint("at.ckpt")  # at step 300
    again = scope["landscape"].LightningMonitor(scope["F"].mse_loss, scope["batch"], every=10, overhead=1e9)
    given = {"accelerator": "cpu", "accumulate_grad_batches": 2, **scope["quiet"]}
    trainer = lightning.Trainer(callbacks=[again], max_epochs=305, **given)
    quarters = scope["DataLoader"](scope["loader"].dataset, batch_size=64)
    trainer.fit(scope["Regression"](), quarters, ckpt_path="at.ckpt")
    assert series(tmp_path / "run.h5") == {"Regression": [*steps, 310]}  # ten more updates of two batches each


def test_transformers_as_shown_reaches_the_edge_of_adam_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(PLAIN.partition("monitor =")[0], scope)
    shown = TRANSFORMERS.replace('save_strategy="no"', 'save_strategy="steps", save_steps=190')
    exec(shown.replace('out="run.h5")', 'out="run.h5", on_row=lambda row: trainer.log(row))'), scope)
    logged = [row["step"] for row in scope["trainer"].state.log_history if "critical_sharpness" in row]
    assert logged[0] == 10
    steps = list(range(0, 201, 10))
    assert series(tmp_path / "run.h5") == {"GPT2LMHeadModel": steps}
    found = ratio(tmp_path / "run.h5", "preconditioned", "preconditioned_threshold")
    assert found[1] < 0.2
    assert 0.85 < found[12:].mean() < 1.3
    ((_, data),) = reader.groups(tmp_path / "run.h5")
    model = scope["trainer"].model
    inputs = {name: tensor for name, tensor in scope["batch"].items()}
    with torch.no_grad():
        loss = model.eval()(**inputs).loss.item()
    assert data["loss"].values[-1] == pytest.approx(loss, rel=1e-5)
    scope["trainer"].train(resume_from_checkpoint="trained/checkpoint-190")
    assert series(tmp_path / "run.h5") == {"GPT2LMHeadModel": steps}


def in_tensorboard(folder: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "events"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("monitor/loss")}


def in_wandb(folder: Path) -> dict[int, float]:
    """The last row, and that the file for a later upload has the names of all."""
    summary = __import__("wandb").run.summary
    last = {int(summary["monitor/step"]): float(summary["monitor/loss"])}
    __import__("wandb").finish()
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert written.read_bytes().count(b"monitor/critical_sharpness") >= 3
    return last


def in_mlflow(folder: Path) -> dict[int, float]:
    mlflow = __import__("mlflow")
    run = mlflow.active_run().info.run_id
    found = {one.step: one.value for one in mlflow.MlflowClient().get_metric_history(run, "monitor/loss")}
    mlflow.end_run()
    return found


@pytest.mark.parametrize(
    ("recipe", "package", "read"),
    [*zip(LOGGERS, ["tensorboard", "wandb", "mlflow"], [in_tensorboard, in_wandb, in_mlflow], strict=True)],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_the_recipe_of_a_logger_as_shown_stores_every_row(
    recipe: str,
    package: str,
    read: Callable[[Path], dict[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    scope: dict[str, Any] = {}
    exec(recipe, scope)
    exec(PLAIN.replace('out="run.h5")', 'out="run.h5", on_row=on_row)').replace("range(1000)", "range(100)"), scope)
    for name in {"monitor", "writer"} & scope.keys():
        scope[name].close()
    ((_, data),) = reader.groups(tmp_path / "run.h5")
    stored = dict(zip(data["step"].values.tolist(), data["loss"].values.tolist(), strict=True))
    found = read(tmp_path)
    assert max(found) == 100
    assert package == "wandb" or sorted(found) == sorted(stored)
    assert found == {step: pytest.approx(stored[step], rel=1e-6) for step in found}
    assert "is not called again" not in caplog.text

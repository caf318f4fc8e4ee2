"""Sweeps of one argument: which networks belong together, the numbers of the figure, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from command_line import Command

from landscape import models
from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.figures import sweep_study
from landscape.results import reader
from landscape.studies import kinds

pytestmark = pytest.mark.slow

Stored = list[tuple[str, xr.Dataset]]


def results(value: Any, *, seed: int = 0, epoch: float = 9.0, accuracy: float = 0.5, **others: Any) -> Stored:
    """Calibration on both splits and hessian of one network, as a results file gives them."""
    configuration = {"model": "vit_demo", "patch": value, "heads": 3, "seed": seed, **others}
    attributes = {
        "configuration": json.dumps(configuration), "checkpoint_sha256": json.dumps([configuration, epoch]),
        "epoch": epoch, "label": f"patch {value}", "model": "vit_demo", "protocol": "made up",
    }  # fmt: skip
    found: Stored = []
    for split in ("test", "train"):
        numbers = {"accuracy": accuracy, "nll": 1 - accuracy}
        data = {f"{name}{end}": number + shift for name, number in numbers.items()
                for end, shift in (("", 0.0), ("_low", -0.1), ("_high", 0.1))}  # fmt: skip
        found.append(("calibration/x", xr.Dataset(data, attrs={**attributes, "spec": json.dumps({"split": split})})))
    spectrum = xr.Dataset({"largest": ("batch", [10.0, 30.0]), "nep": 0.2, "nep_low": 0.1, "nep_high": 0.3})
    spectrum = spectrum.assign(ape=5.0, ape_low=4.0, ape_high=7.0, mean_largest=20.0, mean_largest_se=10.0)
    return [*found, ("hessian/x", spectrum.assign_attrs(attributes))]


def test_networks_that_differ_in_one_argument_are_a_sweep_in_its_order() -> None:
    stored = [*results(None), *results(8, accuracy=0.4), *results(16), *results(4), *results(4, seed=1, accuracy=0.7)]
    (study,) = kinds.sweep(stored)
    assert (study.argument, study.values, study.label) == ("patch", ["4", "8", "16", "none"], "vit_demo-patch")
    rows = kinds.sweep_table(study)
    assert [(row["patch"], row["seed"], row["accuracy"]) for row in rows[:3]] == [
        ("4", "0", 0.5), ("4", "1", 0.7), ("8", "0", 0.4),
    ]  # fmt: skip
    assert (rows[0]["largest eigenvalue"], rows[0]["APE"]) == (20.0, 5.0)
    upper, trained, fit, largest, nep, ape = sweep_study.page(study).axes
    np.testing.assert_allclose(trained.lines[-1].get_ydata(), [0.4, 0.6, 0.5, 0.5])
    np.testing.assert_allclose(ape.lines[-1].get_ydata(), 5.0)
    (ends,) = ape.containers[0][2][0].get_segments()
    assert ends[:, 1].tolist() == [4.0, 7.0]
    np.testing.assert_allclose(upper.lines[-1].get_ydata(), [0.6, 0.4, 0.5, 0.5])  # means over seeds
    assert [text.get_text() for text in fit.texts] == ["4", "8", "16", "none"]  # once per value
    (points, _, _) = fit.containers[2]
    assert (points.get_xdata()[0], points.get_ydata()[0]) == pytest.approx((0.6, 0.6))
    assert [ax.get_ylabel() for ax in (largest, nep, ape)] == [
        "largest Hessian eigenvalue", "negative eigenvalues (NEP)", "positive eigenvalues (APE)",
    ]  # fmt: skip


def test_other_networks_and_too_few_values_are_no_sweep() -> None:
    assert kinds.sweep([*results(4), *results(8)]) == []
    assert kinds.sweep([*results(4), *results(8, heads=6), *results(16, heads=12)]) == []
    plain = [(name, data.drop_attrs()) for value in (4, 8, 16) for name, data in results(value)]
    assert kinds.sweep(plain) == []


def test_the_command_without_a_sweep_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as of networks of which one has no second token."""
    for step in ("load", "carry_out"):
        monkeypatch.setattr(f"landscape.cli.study.{step}", lambda *_, **options: None)
    monkeypatch.setattr(reader, "groups", lambda path: [*results(4), *results(8)])
    monkeypatch.setattr(drawing, "draw_studies", lambda *_, **options: [])
    assert exit_code(["sweep", "p4.pt", "p8.pt", "--out", str(tmp_path / "r.h5"), "--quiet"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "r.h5: it holds patch 4, patch 8, expected networks that landscape train wrote, with 3 values" in said.err
    assert said.err.count("\n") == 1


def test_of_the_snapshots_of_a_run_the_last_one_counts() -> None:
    stored = [*results(4, epoch=9.0), *results(4, epoch=1.0, accuracy=0.1), *results(8), *results(16)]
    (study,) = kinds.sweep(stored)
    assert [row["accuracy"] for row in kinds.sweep_table(study)] == [0.5, 0.5, 0.5]


def test_a_sweep_without_some_of_its_numbers_is_drawn() -> None:
    stored = [pair for value in (4, 8, 16) for pair in results(value)[:1]]
    (study,) = kinds.sweep(stored)
    texts = [[text.get_text() for text in ax.texts] for ax in sweep_study.page(study).axes]
    assert texts == [[], *[["not measured"]] * 5]


def test_arguments_that_a_checkpoint_leaves_out_are_those_of_the_network() -> None:
    found = models.arguments_of("localvit_ti", {"patch": "8", "classes": 10})
    assert (found["neighbourhood"], found["patch"], found["dim"], found["heads"]) == (3, 8, 192, 3)
    assert set(found) - {"classes"} <= set(models.accepts("localvit_ti"))


@pytest.mark.campaign
def test_networks_are_measured_and_drawn_by_one_command(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for patch in ("2", "4", "8"):
        words = ["train", "vit_demo", "--data", "digits", "--epochs", "0", "--out", f"p{patch}"]
        assert command(*words, "--model-arg", f"patch={patch}", "--model-arg", "depth=1")[0] == 0
    words = ["sweep", "p2", "p4", "p8", "--samples", "16", "--batch-size", "8", "--batches", "1", "--quiet"]
    code, out, err = command(*words)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["patch", "2", "4", "8", "figures/sweep.png"]
    (study,) = kinds.sweep(reader.groups(Path("results.h5")))
    assert all(np.isfinite([row["training NLL"], row["NEP"], row["APE"]]).all() for row in kinds.sweep_table(study))

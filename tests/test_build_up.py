"""The build-up study: placements of self-attentions, accuracy over seeds, and networks that do not belong together."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Command, one_line

from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.cli.main import exit_code
from landscape.plots.figures import build_up
from landscape.statistics.means import mean_and_standard_error

pytestmark = pytest.mark.slow


def network(path: Path, *, model: str = "alternet_demo", msa: tuple[int, ...] | None = None, **about: Any) -> Path:
    arguments = {} if msa is None else {"msa": msa}
    entries = {"data": {"name": "digits"}, "metrics": {"accuracy": 0.5, "loss": 1.0}, "seed": 0, **about}
    write_checkpoint(
        path, model=model, model_args=arguments, state_dict={"w": torch.zeros(1)}, recipe={}, epoch=1.0, **entries
    )
    return path


def test_trained_networks_are_counted_by_their_self_attentions(tmp_path: Path, command: Command) -> None:
    files = []
    for seed, level in ((0, 0.4), (1, 0.6)):
        for count, msa in enumerate([(0, 0, 0), (0, 0, 1), None]):  # without an argument the network has two
            metrics = {"accuracy": level + 0.1 * count, "loss": 2.0 - count}
            files.append(network(tmp_path / f"{count}-{seed}.pt", msa=msa, seed=seed, metrics=metrics))
    code, out, _ = command("build-up", *map(str, files), "--out", str(tmp_path / "study"))
    assert code == 0
    assert out.splitlines()[:3] == [f"{n} MSA  accuracy 0.{5 + n} over 2 seeds" for n in range(3)]
    rows = list(csv.DictReader((tmp_path / "study" / "build_up.csv").read_text().splitlines()))
    assert [row["msa"] for row in rows] == ["0", "1", "2"] * 2
    assert mean_and_standard_error(build_up.column(rows, "loss", 1)) == (1.0, 0.0)
    assert (tmp_path / "study" / "build_up.png").exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "resnet_demo"}, "is a resnet_demo, expected an AlterNet"),
        ({"data": {"name": "cifar10"}}, "is alternet_demo on cifar10, the first network alternet_demo on digits"),
        ({"metrics": {}}, "holds no accuracy on the test split"),
    ],
)
def test_networks_that_cannot_be_compared_are_refused(
    tmp_path: Path, command: Command, other: dict[str, Any], message: str
) -> None:
    files = [network(tmp_path / "a.pt"), network(tmp_path / "b.pt", **other)]
    code, _, err = command("build-up", *map(str, files), "--out", str(tmp_path / "study"))
    assert code == 1
    assert one_line(err)
    assert message in err
    assert not (tmp_path / "study").exists()


def test_the_figure_has_the_published_curve_beside_networks_of_its_kind() -> None:
    rows = [
        {"model": "alternet50", "data": "cifar100", "msa": n, "seed": 0, "accuracy": 0.8, "loss": 1.0} for n in (0, 4)
    ]
    (line,) = [line for line in build_up.page(rows).axes[0].lines if line.get_marker() == "x"]
    assert np.asarray(line.get_ydata()).tolist() == [0.8248, 0.8345, 0.8366, 0.8377, 0.8402]


def test_options_that_contradict_each_other_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["build-up"]) == 2
    assert "give trained AlterNets, or --data NAME" in capsys.readouterr().err
    assert exit_code(["build-up", str(network(tmp_path / "a.pt")), "--data", "digits"]) == 2
    assert exit_code(["build-up", "--data", "digits", "--model-arg", "msa=0,0,1"]) == 2


@pytest.mark.parametrize(
    ("seeds", "said"), [(1, "no errors"), (3, "no error bars, which need 4"), (4, "95 % intervals")]
)
def test_a_caption_promises_the_error_bars_that_are_drawn(seeds: int, said: str) -> None:
    rows = [
        {"model": "alternet50", "data": "digits", "msa": n, "seed": seed, "accuracy": 0.5 + 0.01 * seed, "loss": 1.0}
        for n in range(2) for seed in range(seeds)
    ]  # fmt: skip
    page = build_up.page(rows)
    assert said in " ".join(" ".join(text.get_text() for text in page.texts).split())
    (bars,) = page.axes[0].containers
    assert any(np.ptp(bar[:, 1]) > 0 for bar in bars.lines[2][0].get_segments()) == (seeds == 4)


@pytest.mark.campaign
def test_the_networks_of_a_build_up_are_trained_once(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("landscape.plots.drawing.draw_run", lambda *_: [])  # of every training, each time
    words = ["build-up", "--data", "digits", "--epochs", "0", "--seeds", "1", "--out", str(tmp_path)]
    code, out, err = command(*words)
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines() if "accuracy" in line and " MSA " in line] == ["0", "1", "2"]
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("alternet_demo/checkpoints/*/final.pt")}
    assert len(written) == 3
    assert command(*words)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written

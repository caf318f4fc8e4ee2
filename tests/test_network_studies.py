"""Figures of several networks: one column each (heads), sweeps over an argument, and the build-up study."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from analytic import random_batch
from command_line import Command, one_line
from torch import nn

import landscape
from landscape import models
from landscape.checkpoints.checkpoint import write_checkpoint
from landscape.cli.main import exit_code
from landscape.options import OptionError
from landscape.plots import drawing
from landscape.plots.figures import build_up, heads_study, sweep_study
from landscape.results import reader
from landscape.statistics.means import mean_and_standard_error
from landscape.studies import kinds
from landscape.studies.network_tables import options_instead, within
from landscape.studies.study import Network, members_of

pytestmark = pytest.mark.slow


def measured(path: Path) -> Path:
    """Surface and spectrum of tiny networks with dropout, labelled `net0`, `net1`, deterministic and with two masks."""
    inputs, targets = random_batch((3, 8, 8), 16, 4, seed=0)
    for k in range(2):
        torch.manual_seed(k)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
        ).eval()
        for masks in (0, 2):
            subject = landscape.load(
                model, data=(inputs.float(), targets), mc_dropout=masks, batch_size=16, label=f"net{k}"
            )
            landscape.measure("surface", subject, out=path, quiet=True, resolution="3")
            landscape.measure("hessian", subject, out=path, quiet=True, batches=1, top=2)
    return path


@pytest.mark.campaign
def test_results_of_one_network_share_a_column_and_have_their_rows(tmp_path: Path) -> None:
    path = measured(tmp_path / "r.h5")
    stored = reader.groups(path)
    (study,) = kinds.heads(stored)
    assert [network.label for network in study.networks.values()] == ["net0", "net1"]
    inserted = Network(["gap-det", "gap-mc"], results={"surface": xr.Dataset(attrs={"smoothing": "blur=3"})})
    assert heads_study.label_of(inserted) == "gap, smoothing inserted"
    figure = heads_study.page(study)
    titles = [ax.get_title() for ax in figure.axes[:4]]
    assert titles == ["net0\ndeterministic", "net1\ndeterministic", "2 dropout masks", "2 dropout masks"]
    spectra = figure.axes[4:6]
    assert [[line.get_linestyle() for line in ax.lines] for ax in spectra] == [["-", "--"], ["-", "--"]]
    assert all(ax.texts[0].get_text().startswith("APE ") for ax in spectra)
    (file,) = drawing.draw_studies(path, tmp_path / "figures")
    assert file.name == "heads.png"
    for part in ([(name, data) for name, data in stored if data.attrs["label"] == "net0"],
                 [(name, data) for name, data in stored if not members_of(data)]):  # fmt: skip
        assert kinds.heads(part) == []  # a network alone, or networks without masks


def test_networks_of_which_nothing_can_be_measured_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy.py").write_text(
        "import torch\nclass Noisy(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x + torch.randn_like(x))\n"
        "def model(): return Noisy(4, 3)\ndef data(): return torch.randn(8, 4), torch.arange(8) % 3\n"
    )
    own = ["--model", f"{tmp_path}/noisy.py:model", "--data", f"{tmp_path}/noisy.py:data"]
    assert exit_code(["heads", *own, "--batches", "1", "--out", str(tmp_path / "r.h5"), "--quiet"]) == 1
    assert (
        "landscape: nothing to measure: the model (Noisy) draws random numbers in evaluation mode"
        in capsys.readouterr().err
    )


def test_errors_of_a_shipped_study_are_those_of_the_options_that_change_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, said in {
        "build-up --data digits --recipe foo": "--recipe foo is unknown", "demo --epochs -1": "--epochs must be",
        "reproduce --data digits --fraction 0": "--fraction must be",
        "smoothing --model vit_demo --data digits --samples 4 --smooth-block foo": "--smooth-block must be",
    }.items():  # fmt: skip
        assert exit_code([*words.split(), "--quiet"]) == 2
        assert capsys.readouterr().err.startswith(f"landscape: {said}")
    for error, expected in {
        OptionError("--no-augment and --mc-dropout, --spectrum"): "--no-augment and --sizes, spectrum",
        ValueError("no mini-batch"): "hessian of a: no mini-batch",
    }.items():
        options = {"mc_dropout": "sizes", "augment": "augment"}
        with (
            pytest.raises(type(error)) as raised,
            options_instead(options),
            within("file"),
            within("at", "hessian of a"),
        ):
            raise error
        assert str(raised.value) == expected


@pytest.mark.campaign
def test_networks_are_measured_and_drawn_by_one_command(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        words = ["train", "resnet_demo", "--data", "digits", "--epochs", "0", "--out", name]
        words += ["--model-arg", "width=4", "--model-arg", "blocks=1,1"]
        assert command(*words, *(["--model-arg", "mc_dropout=0.2"] if name == "a" else []))[0] == 0
    words = ["heads", "a/final.pt", "b/final.pt", "--masks", "2", "--samples", "16", "--batch-size", "8"]
    code, out, err = command(*words, "--resolution", "3", "--batches", "1")
    assert code == 0, err
    assert out.split() == ["figures/heads.png"]
    assert err.count("surface 2 of b each is left out") == 1  # with and without the options of the others alike
    assert "surface 2 of b each is left out: the model (ResNet) has no dropout" in err
    (study,) = kinds.heads(reader.groups(Path("results.h5")))
    assert [sorted(one.results) for one in study.networks.values()] == [
        [("hessian", False), ("hessian", True), ("surface", False), ("surface", True)],
        [("hessian", False), ("surface", False)],
    ]
    assert command("heads", "--masks", "0")[0] == 2


# --- Sweeps of one argument: which networks belong together, the numbers of the figure, and the command ---


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
    chosen = zip((4, 8, 16), ("contiguous", "channels_last", "channels_last"), strict=True)  # by what is faster
    assert len(kinds.sweep([one for value, form in chosen for one in results(value, memory_format=form)])) == 1
    plain = [(name, data.drop_attrs()) for value in (4, 8, 16) for name, data in results(value)]
    assert kinds.sweep(plain) == []


def test_the_command_without_a_sweep_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as of networks of which one has no second token."""
    for step in ("load", "carry_out"):
        monkeypatch.setattr(f"landscape.cli.study.{step}", lambda *_, **options: None)
    monkeypatch.setattr(reader, "groups", lambda path: [*results(4), *results(8, heads=6)])
    monkeypatch.setattr(drawing, "draw_studies", lambda *_, **options: [])
    assert exit_code(["sweep", "p4.pt", "p8.pt", "--out", str(tmp_path / "r.h5"), "--quiet"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "r.h5: it holds patch 4, patch 8, which differ in patch, heads, expected networks that" in said.err
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
def test_a_sweep_is_measured_and_drawn_by_one_command(
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


# --- The build-up study: placements of self-attentions, and networks that do not belong together ---


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

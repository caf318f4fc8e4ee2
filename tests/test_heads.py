"""Surfaces and spectra of several networks in one figure: what belongs to which network, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xarray as xr
from analytic import random_batch
from command_line import Command
from torch import nn

import landscape
from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.figures import heads_study
from landscape.results import reader
from landscape.studies import kinds
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
    assert "surface 2 of b each is left out: the model (ResNet) has no dropout" in err
    (study,) = kinds.heads(reader.groups(Path("results.h5")))
    assert [sorted(one.results) for one in study.networks.values()] == [
        [("hessian", False), ("hessian", True), ("surface", False), ("surface", True)],
        [("hessian", False), ("surface", False)],
    ]
    assert command("heads", "--masks", "0")[0] == 2

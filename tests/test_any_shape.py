"""Models and losses of any shape: structured batches and outputs, losses that see the batch or call the model."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from measured_runs import FASTER
from shapes import CASES, SAMPLES, drawn, losses_by_hand, subject_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import landscape
from landscape.api import measure
from landscape.cli.main import exit_code
from landscape.plots.headlines import summary
from landscape.predictions.evaluation import metrics_of
from landscape.probes import PROBES, probe_class
from landscape.products.vectors import flat
from landscape.subject.loading.load import load
from landscape.subject.loading.sanity_check import check_sanity

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of rows that torch computes one by one
@pytest.mark.parametrize("case", CASES)
def test_the_hessian_is_that_of_the_loss_by_hand(case: str) -> None:
    subject = subject_of(case)
    found = measure("hessian", subject, out=None, top=2, kinks="single", quiet=True)
    parameters = list(subject.model.parameters())
    for i, losses in enumerate(losses_by_hand(case, subject.model)):
        gradient = flat(torch.autograd.grad(losses.mean(), parameters, create_graph=True, materialize_grads=True))
        every: dict[str, Any] = {"is_grads_batched": True, "materialize_grads": True, "allow_unused": True}
        rows = torch.autograd.grad(gradient, parameters, torch.eye(len(gradient)).to(gradient), **every)
        values = torch.linalg.eigvalsh(torch.cat([part.flatten(1) for part in rows], dim=1))
        largest = values[values.abs().argsort(descending=True)[:2]]
        np.testing.assert_allclose(found.eigenvalue[i], largest, rtol=2e-4, atol=1e-9)
        assert found.loss[i].item() == pytest.approx(losses.mean().item(), rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_a_surface_has_the_loss_and_its_error_at_the_centre(case: str) -> None:
    subject = subject_of(case)
    found = measure("surface", subject, out=None, resolution=3, quiet=True)
    losses = torch.cat(losses_by_hand(case, subject.model)).detach()
    centre = found.sel(x=0.0, y=0.0)
    assert centre.loss.item() == pytest.approx(losses.mean().item(), rel=1e-9)
    assert centre.loss_se.item() == pytest.approx(losses.std().item() / math.sqrt(SAMPLES), rel=1e-9)
    assert found.attrs["samples"] == SAMPLES
    assert found.loss.notnull().all()
    assert len(set(found.loss.values.ravel())) == 9


NO_MAP = "no layer of this model has a map of positions"
NO_UNIT = "no unit of this network can be removed"
WITHOUT = {
    **{(case, "variance"): NO_MAP for case in CASES if case != "segmentation"},
    **{(case, "lesion"): NO_UNIT for case in ("autoencoder", "sentences", "graphs", "segmentation")},
    ("graphs", "similarity"): "message has 14 rows for 4 samples, expected one for each; name other layers",
}


@pytest.mark.parametrize("probe", ["line", "trace", "density", "lesion", "variance", "similarity"])
@pytest.mark.parametrize("case", CASES)
def test_other_probes_run_or_say_in_one_line_why_not(case: str, probe: str) -> None:
    options: dict[str, Any] = {
        "line": {"resolution": 3},
        "trace": {"vectors": 4, "hvp": "double-backward"},  # the eigenvalues above are by the backend chosen
        "density": {"vectors": 1, "steps": 3, "hvp": "double-backward"},
    }.get(probe, {})
    subject = subject_of(case)
    if (case, probe) in WITHOUT:
        with pytest.raises(ValueError, match=WITHOUT[case, probe]):
            measure(probe, subject, out=None, quiet=True, **options)
    else:
        assert (measure(probe, subject, out=None, quiet=True, **options).done == 1).all()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(0.25)
        return cast(Tensor, self.head(x))


def test_a_model_that_changes_its_input_in_place_gets_a_copy() -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    before = inputs.clone()
    torch.manual_seed(0)
    model = InPlace()
    subject = load(model, data=(inputs, targets), batch_size=4)
    wanted = F.cross_entropy(model.head((before - 0.5) / 0.25), targets).item()
    for _ in range(2):
        found = measure("surface", subject, out=None, resolution=3, quiet=True)
        assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
    plain = nn.Sequential(model.head)
    other = load(plain, data=((before - 0.5) / 0.25, targets), batch_size=4)
    pair = [measure("hessian", s, out=None, top=1, quiet=True).eigenvalue for s in (subject, other)]
    np.testing.assert_allclose(*pair, rtol=1e-5)
    assert torch.equal(inputs, before)


class Unsteady(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind, self.calls = nn.Linear(3, 2), kind, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = {"counter": lambda: self.calls, "system": lambda: int.from_bytes(os.urandom(2)), "torch": torch.rand}
        return cast(Tensor, self.head(x) * (1 + factor[self.kind](*((1,) if self.kind == "torch" else ()))))


@pytest.mark.parametrize("probe", ["hessian", "trace", "variance", "lesion", "noise", "surface"])
@pytest.mark.parametrize(
    ("kind", "words"), [("counter", "other outputs"), ("system", "other outputs"), ("torch", "random")]
)
def test_a_model_that_changes_between_passes_is_refused_by_every_probe(probe: str, kind: str, words: str) -> None:
    subject = load(Unsteady(kind), data=(drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2))
    with pytest.raises(ValueError, match=words):
        measure(probe, subject, out=None, quiet=True)


@pytest.mark.parametrize("case", CASES)
def test_a_sanity_check_and_the_metrics_know_every_shape(case: str) -> None:
    subject = subject_of(case)
    losses = torch.cat(losses_by_hand(case, subject.model)).detach()
    assert check_sanity(subject).loss == pytest.approx(losses.mean().item(), rel=1e-9)
    assert metrics_of(subject)["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


MINE = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)
    def forward(self, a, b):
        return {"sum": self.left(a) + self.right(b), "left": self.left(a)}

def model():
    torch.manual_seed(0)
    return Twice()

def data(split="train"):
    generator = torch.Generator().manual_seed(int(split == "test"))
    return {"a": torch.randn(12, 3, generator=generator), "b": torch.randn(12, 4, generator=generator),
            "y": torch.arange(12) % 2}

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs["sum"], batch["y"], reduction="none") + outputs["left"].square().sum(1)

def whole(model, batch):
    return loss(model(batch["a"], batch["b"]), batch)
"""


def test_the_command_takes_structured_batches_and_losses_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    common = ["--model", "mine.py:model", "--data", "mine.py:data", "--batch-size", "4"]
    for loss in ("loss", "whole"):
        asked = ["--loss", f"mine.py:{loss}", "--label", loss]
        assert exit_code(["hessian", *common, *asked, "--top", "2"]) == 0
        assert exit_code(["surface", *common, *asked, "--resolution", "3"]) == 0
        assert exit_code(["evaluate", *common, *asked[:2], "--split", "test"]) == 0
    assert "mine.py:data train, 12 samples, batch size 4" in capsys.readouterr().err
    tree = landscape.open("results.h5")
    for probe, quantity in (("hessian", "eigenvalue"), ("surface", "loss")):
        one, two = (node[quantity].values for node in tree[probe].children.values())
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_complex_weights_are_evaluated_but_have_no_surface() -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)

    model, data = Fourier(), (drawn(SAMPLES, 8), drawn(SAMPLES, 8, seed=1))
    subject = load(model, data=data, loss="mse")
    assert metrics_of(subject)["loss"] == pytest.approx(F.mse_loss(model(data[0]), data[1]).item(), rel=1e-6)
    for probe in ("surface", "hessian"):
        with pytest.raises(ValueError, match="the parameter weight is complex64, expected real numbers"):
            measure(probe, subject, out=None, quiet=True)


def test_the_frequencies_of_a_model_with_several_inputs_are_those_of_its_image() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.shift = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Linear(1, 3)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return cast(Tensor, self.second(self.first(x) + self.shift(t)[:, :, None, None]).mean(dim=(2, 3)))

    model, images = Conditioned(), drawn(SAMPLES, 1, 9, 9)
    subject = load(model, data={"t": drawn(SAMPLES, 1), "x": images, "y": drawn(SAMPLES, 2)}, loss="mse")
    found = measure("fourier", subject, out=None, quiet=True)
    assert (found.done == 1).all()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return cast(Tensor, (self.features(first) - self.features(second)).flatten(1).square().mean(1, keepdim=True))


OF_MAPS = ("fourier", "variance", "uncertainty", "similarity", "geometry", "noise", "stream")


def test_feature_maps_of_two_pictures_are_scaled_by_the_pictures() -> None:
    data = [(drawn(4, 1, 8, 8), drawn(4, 1, 8, 8, seed=1), torch.tensor([0.0, 1, 0, 1])) for _ in range(2)]
    found = measure("fourier", load(Siamese(), data=data, loss="mse"), out=None, quiet=True)
    assert found.scale.values.tolist() == [1.0] * found.sizes["layer"]


@pytest.mark.parametrize(("probe", "side"), [*itertools.product(OF_MAPS, (1, 2)), ("fourier", 3)])
def test_maps_of_few_positions_give_numbers_or_say_that_they_give_none(probe: str, side: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()  # fmt: skip
    subject = landscape.load(model, data=(torch.randn(8, 3, side, side), torch.arange(8) % 3))
    options = dict(probe_class(probe).smallest)
    if (probe, side) == ("uncertainty", 1):
        with pytest.raises(ValueError, match="every map of this model is a single position, which has no spread"):
            measure(probe, subject, out=None, quiet=True, **options)
        return
    stored = measure(probe, subject, out=tmp_path / "results.h5", quiet=True, **options)
    assert (stored.done == 1).all()
    (row,) = summary(tmp_path / "results.h5")
    none = (probe, side) in {("fourier", 1), ("fourier", 2), ("variance", 1)}
    assert (row["headline"] == "no number is finite: more samples or larger maps may have some") is none
    assert row["headline"]


class Attending(nn.Module):
    """A convolution, dropout, one self-attention and a classifier, for pictures of any side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.1)
        self.attn, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.drop(self.conv(x).relu()).flatten(2).mT
        tokens = tokens + self.attn(tokens, tokens, tokens)[0]
        scores: Tensor = self.head(tokens.mean(1))
        return scores


def attending(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Attending().eval()


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(("count", "side", "classes"), [(8, 1, 3), (3, 2, 1), (1, 4, 1)])
@pytest.mark.campaign
def test_the_smallest_data_are_measured_or_refused_in_one_line(
    count: int, side: int, classes: int, probe: str, tmp_path: Path
) -> None:
    """Pictures of one pixel and of four, one sample and three of one class: no other error than a refusal."""
    model = attending(0)
    options = {**probe_class(probe).smallest, **FASTER.get(probe, {})}
    for epoch in range(3 if probe == "trajectory" else 0):
        torch.save(attending(epoch).state_dict(), tmp_path / f"epoch_{epoch}.pt")
    options |= {"run": str(tmp_path)} if probe == "trajectory" else {}
    options |= {"snapshots": "", "members": [attending(1)]} if probe in ("ensemble", "barriers") else {}
    options |= {"against": attending(1)} if probe == "align" else {}
    pictures = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    data, refusal, out = None, "", tmp_path / "r.h5"
    try:
        subject = landscape.load(model, data=TensorDataset(pictures, torch.arange(count) % classes), batch_size=4)
        data = measure(probe, subject, out=out, quiet=True, **options)
    except ValueError as error:
        refusal = str(error)
    if data is None:
        assert re.fullmatch(".+", refusal)  # one line
    else:
        assert (data.done == 1).all()
        assert summary(out)[0]["headline"]


def test_classes_of_positions_that_lie_second_are_told_to_lie_last() -> None:
    data = (torch.randn(6, 2, 5), torch.randint(3, (6, 5)))
    with pytest.raises(ValueError, match=r"\(2, 3, 5\) for targets \(2, 5\): .* return outputs.transpose\(1, 2\)"):
        landscape.load(nn.Conv1d(2, 3, 1), data=data)
    last = nn.Sequential(Transposed(), nn.Linear(2, 3))
    assert metrics_of(landscape.load(last, data=data))["loss"] > 0


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Translating(nn.Module):
    """Needs targets to run, as the encoder-decoders of transformers do, and returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            raise ValueError("You have to specify either decoder_input_ids or decoder_inputs_embeds")
        logits = self.head(self.table(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


def test_a_model_that_needs_its_targets_is_told_to_take_its_own_loss() -> None:
    data = [{"input_ids": torch.randint(9, (4, 5)), "labels": torch.randint(9, (4, 5))}] * 2
    with pytest.raises(
        ValueError, match=r"decoder_input_ids.*or take the loss of the model itself, a function \(model, b"
    ):
        landscape.load(Translating(), data=data)
    subject = landscape.load(Translating(), data=data, loss=lambda model, batch: model(**batch).loss)
    assert metrics_of(subject)["loss"] > 0

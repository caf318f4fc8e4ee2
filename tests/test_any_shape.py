"""Models and losses of any shape: structured batches and outputs, losses that see the batch or call the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import landscape
from landscape.api import measure
from landscape.cli.main import exit_code
from landscape.curvature.vectors import flat
from landscape.subject.evaluation import metrics_of
from landscape.subject.loading import load
from landscape.subject.sanity_check import check_sanity
from landscape.subject.subject import Subject

SAMPLES = 12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Autoencoder(nn.Module):
    """A variational autoencoder that returns a dictionary and draws its noise from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, log_variance = torch.tanh(self.encoder(x)).chunk(2, dim=1)
        return {"decoded": self.decoder(mean + (log_variance / 2).exp() * noise), "mean": mean, "spread": log_variance}


def evidence(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    divergence = (outputs["mean"].square() + outputs["spread"].exp() - 1 - outputs["spread"]).sum(dim=1) / 2
    return (outputs["decoded"] - batch["x"]).square().sum(dim=1) + divergence


class HeatEquation(nn.Module):
    """A physics-informed network: its output is the residual of u_xx = -u, by derivatives inside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return cast(Tensor, curvature + u)


class Sentences(nn.Module):
    """An LSTM over padded sequences of known lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return cast(Tensor, self.head(hidden[-1]))


class GraphNetwork(nn.Module):
    """Sums messages along edges, then nodes of each graph: nodes and edges are packed over the graphs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        received = (
            torch.zeros(len(nodes), 6).to(nodes).index_add(0, edges[1], torch.tanh(self.message(nodes))[edges[0]])
        )
        return cast(Tensor, self.head(torch.zeros(int(graph.max()) + 1, 6).to(nodes).index_add(0, graph, received)))


def graphs() -> list[dict[str, Tensor]]:
    """Three batches of four graphs of two to five nodes."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(3):
        sizes = torch.randint(2, 6, (4,), generator=generator)
        count = int(sizes.sum())
        starts = sizes.cumsum(0) - sizes
        edges = torch.cat(
            [torch.combinations(torch.arange(int(n))).T + s for n, s in zip(sizes, starts, strict=True)], 1
        )
        batches.append(
            {
                "nodes": torch.randn(count, 3, generator=generator),
                "edges": edges,
                "graph": torch.repeat_interleave(torch.arange(4), sizes),
                "y": torch.randint(2, (4,), generator=generator),
            }
        )
    return batches


class Segmentation(nn.Module):
    """A U-Net of one level: a logit for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(3, 3, 2, stride=2), nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.down(x))
        inner = torch.tanh(self.inner(F.avg_pool2d(first, 2)))
        return cast(Tensor, self.head(torch.cat([first, self.up(inner)], dim=1)))


def per_pixel(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).mean(dim=1)


class Denoiser(nn.Module):
    """Predicts the noise that was added to a sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 4))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return cast(Tensor, self.net(torch.cat([noisy, time[:, None]], dim=1)))


def diffusion(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    clean, noise, time = batch
    noisy = (1 - time)[:, None] * clean + time[:, None] * noise
    return cast(Tensor, (model(noisy, time) - noise).square().mean(dim=1))


@dataclass
class Measured:
    """A batch as a dataclass, as users pack theirs."""

    features: Tensor
    target: Tensor


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, batch: Measured) -> Tensor:
        return cast(Tensor, self.net(batch.features))


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=1)


class Tokens(Dataset[dict[str, Any]]):
    """Samples as dicts, with a text beside the tensors."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= SAMPLES:
            raise IndexError(i)
        tokens = torch.randint(9, (6,), generator=torch.Generator().manual_seed(i))
        return {"tokens": tokens, "lengths": torch.tensor(1 + i % 6), "labels": i % 3, "text": f"sentence {i}"}


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Any]
CASES: dict[str, Case] = {
    "autoencoder": (Autoencoder, lambda: {"x": drawn(SAMPLES, 6), "noise": drawn(SAMPLES, 2, seed=1)}, evidence),
    "physics": (HeatEquation, lambda: (drawn(SAMPLES, 1), torch.zeros(SAMPLES, 1)), "mse"),
    "sentences": (Sentences, Tokens, ""),
    "graphs": (GraphNetwork, graphs, ""),
    "segmentation": (
        Segmentation,
        lambda: (drawn(SAMPLES, 1, 6, 6), (drawn(SAMPLES, 1, 6, 6, seed=1) > 0).float()),
        per_pixel,
    ),
    "regression": (Regression, lambda: Measured(drawn(SAMPLES, 3), drawn(SAMPLES, 2, seed=1)), weighted),
    "denoiser": (
        Denoiser,
        lambda: DataLoader(
            TensorDataset(drawn(SAMPLES, 4), drawn(SAMPLES, 4, seed=1), drawn(SAMPLES, seed=2).sigmoid()), batch_size=4
        ),
        diffusion,
    ),
}


def subject_of(case: str) -> Subject:
    build, data, loss = CASES[case]
    torch.manual_seed(0)
    return load(build().double(), data=data(), loss=loss, batch_size=4)


def losses_by_hand(case: str, model: nn.Module) -> list[Tensor]:
    """Losses per sample of every mini-batch of four, without any part of the package."""
    whole = CASES[case][1]()
    rows = [slice(at, at + 4) for at in range(0, SAMPLES, 4)]
    if case == "autoencoder":
        parts = [{name: tensor[row].double() for name, tensor in whole.items()} for row in rows]
        return [evidence(model(**part), part) for part in parts]
    if case == "physics":
        return [model(whole[0][row].double()).square()[:, 0] for row in rows]
    if case == "sentences":
        items = [[whole[i] for i in range(SAMPLES)][row] for row in rows]
        stacked = [
            {k: torch.stack([torch.as_tensor(i[k]) for i in part]) for k in ("tokens", "lengths", "labels")}
            for part in items
        ]
        return [F.cross_entropy(model(b["tokens"], b["lengths"]), b["labels"], reduction="none") for b in stacked]
    if case == "graphs":
        return [
            F.cross_entropy(model(b["nodes"].double(), b["edges"], b["graph"]), b["y"], reduction="none") for b in whole
        ]
    if case == "segmentation":
        return [per_pixel(model(whole[0][row].double()), whole[1][row].double()) for row in rows]
    if case == "regression":
        pairs = [(Measured(whole.features[row].double(), whole.target[row]), whole.target[row]) for row in rows]
        return [weighted(model(batch), target.double()) for batch, target in pairs]
    return [diffusion(model, tuple(part.double() for part in batch)) for batch in whole]


@pytest.mark.parametrize("case", CASES)
def test_the_hessian_is_that_of_the_loss_by_hand(case: str) -> None:
    subject = subject_of(case)
    found = measure("hessian", subject, out=None, top=2, kinks="single", quiet=True)
    parameters = list(subject.model.parameters())
    for i, losses in enumerate(losses_by_hand(case, subject.model)):
        (gradient,) = [flat(torch.autograd.grad(losses.mean(), parameters, create_graph=True, materialize_grads=True))]
        rows = [
            flat(torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True, allow_unused=True))
            for g in gradient
        ]
        values = torch.linalg.eigvalsh(torch.stack(rows))
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
        "trace": {"vectors": 4},
        "density": {"vectors": 1, "steps": 3},
    }.get(probe, {})
    subject = subject_of(case)
    if (case, probe) in WITHOUT:
        with pytest.raises(ValueError, match=WITHOUT[case, probe]):
            measure(probe, subject, out=None, quiet=True, **options)
    else:
        assert (measure(probe, subject, out=None, quiet=True, **options).done == 1).all()


def test_a_loss_that_returns_a_mean_has_values_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    each, mean = (load(model, data=data, loss=nn.CrossEntropyLoss(reduction=r), batch_size=5) for r in ("none", "mean"))
    assert "returns a mean over the mini-batch" in caplog.text
    wanted, found = (measure("surface", s, out=None, resolution=3, quiet=True) for s in (each, mean))
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)
    assert wanted.loss_se.notnull().all()
    assert found.loss_se.isnull().all()
    assert found.rise_se.isnull().all()
    pair = [measure("hessian", s, out=None, top=1, quiet=True).eigenvalue for s in (each, mean)]
    np.testing.assert_allclose(*pair, rtol=1e-5)
    line = measure("line", mean, out=None, quiet=True, along=nn.Linear(3, 2), resolution=3)
    assert line.excess.notnull().all()
    assert line.loss_se.isnull().all()
    assert line.excess_se.isnull().all()
    metrics = metrics_of(mean)
    assert metrics["loss"] == pytest.approx(wanted.loss.sel(x=0, y=0).item(), rel=1e-6)
    assert math.isnan(metrics["loss_se"])


def test_a_users_loss_takes_what_the_model_returns_or_its_logits() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(x), "extra": 2 * self.head(x)}

    def of_dict(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["extra"], targets, reduction="none")

    def of_logits(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    model, data = Both(), (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    logits = model.head(data[0])
    for loss, factor in ((of_dict, 2), (of_logits, 1)):
        wanted = F.cross_entropy(factor * logits, data[1]).item()
        assert load(model, data=data, loss=loss).objective(0).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, targets: outputs, r"the loss returned \(2, 2\) for 2 samples, expected one loss per sample"),
        (lambda outputs, targets: outputs["logits"], "the loss failed with IndexError|the loss failed with TypeError"),
        (lambda model, batch: model(batch), "the loss failed with TypeError"),
    ],
)
def test_a_loss_that_does_not_work_is_refused_in_one_line(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(nn.Linear(3, 2), data=(drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2), loss=loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["pair", "arrays", "dataset", "loader", "batches", "generator"])
def test_one_classifier_has_the_same_loss_from_data_of_every_form(form: str) -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    batches = [(inputs[i : i + 5], targets[i : i + 5]) for i in range(0, SAMPLES, 5)]
    data: Any = {
        "pair": (inputs, targets),
        "arrays": (inputs.numpy(), targets.numpy()),
        "dataset": TensorDataset(inputs, targets),
        "loader": DataLoader(TensorDataset(inputs, targets), batch_size=5),
        "batches": batches,
        "generator": iter(batches),
    }[form]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    found = measure("surface", load(model, data=data, batch_size=4), out=None, resolution=3, quiet=True)
    wanted = F.cross_entropy(model(inputs), targets).item()
    assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
    assert found.attrs["samples"] == SAMPLES
    assert found.attrs["batch_size"] == 4


def test_the_number_of_classes_may_be_given() -> None:
    data = (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    with pytest.raises(ValueError, match="the model has 3 classes and the data in memory has 4"):
        load(nn.Linear(3, 3), data=data, classes=4)
    assert load(nn.Linear(3, 4), data=data, classes=4).images.classes == 4  # type: ignore[union-attr]


def test_samples_without_targets_are_reconstructed() -> None:
    inputs = drawn(SAMPLES, 3)
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    wanted = (model(inputs) - inputs).square().mean().item()
    for data in (TensorDataset(inputs), DataLoader(TensorDataset(inputs), batch_size=4), {"x": inputs}):
        assert metrics_of(load(model, data=data, loss="mse"))["loss"] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="in memory has no targets, which the loss needs"):
        load(model, data=TensorDataset(inputs))


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


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_that_draws_its_noise_is_refused(whole: bool) -> None:
    def of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs + torch.randn_like(outputs) - targets).square().mean(dim=1)

    def of_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return of_outputs(model(batch[0]), batch[1])

    subject = load(nn.Linear(3, 2), data=(drawn(SAMPLES, 3), drawn(SAMPLES, 2)), loss=of_model if whole else of_outputs)
    with pytest.raises(ValueError, match="draws random numbers in evaluation mode"):
        measure("hessian", subject, out=None, quiet=True)


def test_modules_of_equal_weights_and_another_configuration_are_other_questions(tmp_path: Path) -> None:
    data = (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Linear(4, 2)
    tanh, relu = (nn.Sequential(layers[0], act, layers[1]) for act in (nn.Tanh(), nn.ReLU()))
    pair = [
        measure("surface", load(m, data=data), out=tmp_path / "r.h5", resolution=3, quiet=True) for m in (tanh, relu)
    ]
    assert not np.allclose(pair[0].loss, pair[1].loss)


def test_a_loss_made_in_python_is_identified_by_its_code(tmp_path: Path) -> None:
    data = (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, targets: factor * F.cross_entropy(outputs, targets, reduction="none")

    one, two = (
        measure("surface", load(model, data=data, loss=scaled(f)), out=tmp_path / "r.h5", resolution=3, quiet=True)
        for f in (1.0, 2.0)
    )
    np.testing.assert_allclose(two.loss, 2 * one.loss, rtol=1e-6)


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


def test_samples_changed_in_place_are_measured_anew(tmp_path: Path) -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    array = inputs.numpy()  # shares memory, and is changed without a trace
    forms: list[Any] = [(inputs, targets), {"input": inputs, "y": targets}, (array, targets.numpy())]
    for data in forms:
        subject = load(model, data=data)
        for _ in range(2):
            found = measure("surface", subject, out=tmp_path / "r.h5", resolution=3, quiet=True)
            wanted = F.cross_entropy(model(inputs), targets).item()
            assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
            array *= 2


def test_hand_made_batches_changed_in_place_are_measured_anew(tmp_path: Path) -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    subject = Subject(nn.Linear(3, 2), [(inputs, targets)])
    for _ in range(2):
        found = measure("surface", subject, out=tmp_path / "r.h5", resolution=3, quiet=True)
        wanted = F.cross_entropy(subject.model(inputs), targets).item()
        assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
        inputs.data.mul_(2)


def test_batches_of_a_mean_loss_weigh_by_their_number_of_samples() -> None:
    whole = graphs()
    for batch, kept in ((whole[1], 3), (whole[2], 1)):
        inside = batch["graph"] < kept
        nodes = int(inside.sum())
        batch |= {"nodes": batch["nodes"][:nodes], "graph": batch["graph"][:nodes], "y": batch["y"][:kept]}
        batch["edges"] = batch["edges"][:, (batch["edges"] < nodes).all(dim=0)]

    def each(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["y"], reduction="none")

    def mean(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["y"])

    def of_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mean(model(batch["nodes"], batch["edges"], batch["graph"]), batch)

    torch.manual_seed(0)
    model = GraphNetwork().double()
    wanted, *found = (load(model, data=whole, loss=loss) for loss in (each, mean, of_model))
    assert [len(subject) for subject in (wanted, *found)] == [8, 8, 8]
    options: dict[str, Any] = {"out": None, "top": 1, "scope": "dataset", "quiet": True}
    largest = measure("hessian", wanted, **options).eigenvalue
    for subject in found:
        assert metrics_of(subject)["loss"] == pytest.approx(metrics_of(wanted)["loss"], rel=1e-12)
        np.testing.assert_allclose(measure("hessian", subject, **options).eigenvalue, largest, rtol=1e-6)


def test_a_batch_may_refer_to_itself() -> None:
    class Cyclic:
        def __init__(self, features: Tensor, target: Tensor) -> None:
            self.features, self.target, self.batch = features, target, self

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, batch: Cyclic) -> Tensor:
            return cast(Tensor, self.head(batch.batch.features))

    batch = Cyclic(drawn(SAMPLES, 3).double(), torch.arange(SAMPLES) % 2)
    subject = load(Reader(), data=[batch])
    wanted = F.cross_entropy(subject.model.head(batch.features.float()), batch.target).item()
    assert subject.objective(0).item() == pytest.approx(wanted, rel=1e-6)


def test_a_linear_probe_fits_on_the_samples_in_memory_that_it_does_not_score() -> None:
    targets = torch.arange(120) % 3
    data = drawn(120, 3) / 4 + F.one_hot(targets, 3), targets
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    found = measure("probe-linear", load(model, data=TensorDataset(*data), samples=40), out=None, quiet=True)
    assert found.attrs["fitted_on"].startswith("80 samples")
    assert found.accuracy.values[0] > 0.8
    with pytest.raises(ValueError, match=r"the data in memory must have at least .*score fewer with --samples 60"):
        measure("probe-linear", load(model, data=data), out=None, quiet=True)


class Solution(nn.Module):
    """The solution of a differential equation, whose loss differentiates it by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net(x))


def physics(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["interior"].clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope + u).square().mean() + (model(batch["boundary"]) - 1).square().mean()


@pytest.mark.parametrize("counts", [(7, 2), (6, 6)])
def test_a_loss_may_differentiate_the_model_by_its_input(counts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Solution().double()
    batch = {"interior": drawn(counts[0], 1).double(), "boundary": drawn(counts[1], 1, seed=1).double()}
    subject = load(model, data=[batch], loss=physics)
    parameters = dict(model.named_parameters())
    assert metrics_of(subject)["loss"] == pytest.approx(physics(model, batch).item(), rel=1e-12)

    def of_vector(vector: Tensor) -> Tensor:
        parts = vector.split([p.numel() for p in parameters.values()])
        values = {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)}
        return physics(lambda x: torch.func.functional_call(model, values, (x,)), batch)  # type: ignore[arg-type]

    wanted = torch.autograd.functional.hessian(of_vector, flat(parameters.values()).detach())
    eigenvalues = torch.linalg.eigvalsh(cast(Tensor, wanted))
    found = measure("hessian", subject, out=None, top=1, quiet=True).eigenvalue.item()
    assert abs(found) == pytest.approx(eigenvalues.abs().max().item(), rel=1e-6)


def test_a_loss_that_calls_the_model_needs_no_fields_with_the_names_of_its_inputs() -> None:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return cast(Tensor, self.head(torch.cat([x, t[:, None]], dim=1)))

    def denoising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mixed = batch["clean"] * (1 - batch["time"][:, None]) + batch["noise"] * batch["time"][:, None]
        return (model(mixed, batch["time"]) - batch["noise"]).square().mean(dim=1)

    model, time = Denoiser(), torch.linspace(0, 1, SAMPLES)
    data = {"clean": drawn(SAMPLES, 3), "noise": drawn(SAMPLES, 3, seed=1), "time": time}
    subject = load(model, data=data, loss=denoising, batch_size=5)
    assert metrics_of(subject)["loss"] == pytest.approx(denoising(model, data).mean().item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"has the fields clean, noise, time.*or give a loss of \(model, batch\)"):
        load(model, data=data, loss=lambda outputs, batch: outputs.square().mean(dim=1))


def test_a_loss_that_returns_a_sum_is_refused() -> None:
    with pytest.raises(ValueError, match="returns the sum over the mini-batch"):
        load(nn.Linear(3, 2), data=(drawn(SAMPLES, 3), drawn(SAMPLES, 2)), loss=nn.MSELoss(reduction="sum"))


def test_a_loss_that_couples_the_samples_belongs_to_its_batch_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def contrastive(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        first, second = (F.normalize(model(view), dim=1) for view in batch)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))

    torch.manual_seed(0)
    model, views = nn.Linear(3, 4), (drawn(SAMPLES, 3), drawn(SAMPLES, 3, seed=1))
    for size in (SAMPLES, SAMPLES // 2):
        caplog.clear()
        subject = load(model, data=views, loss=contrastive, batch_size=size)
        assert f"couples the samples of a mini-batch: its values belong to mini-batches of {size}" in caplog.text
        found = measure("surface", subject, out=tmp_path / "r.h5", resolution=3, quiet=True)
        parts = zip(*(view.split(size) for view in views), strict=True)
        wanted = np.mean([contrastive(model, part).item() for part in parts])
        assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)


def test_a_column_of_losses_is_one_per_sample() -> None:
    def likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 1:] + (targets - outputs[:, :1]).square() * (-outputs[:, 1:]).exp()

    model, data = nn.Linear(3, 2), (drawn(SAMPLES, 3), drawn(SAMPLES, 1, seed=1))
    metrics = metrics_of(load(model, data=data, loss=likelihood, batch_size=5))
    assert metrics["loss"] == pytest.approx(likelihood(model(data[0]), data[1]).mean().item(), rel=1e-6)
    assert metrics["loss_se"] > 0


def test_a_loss_that_fails_on_samples_without_targets_is_named() -> None:
    with pytest.raises(ValueError, match=r"the loss failed with (Index|Type)Error"):
        load(nn.Linear(3, 3), data=drawn(SAMPLES, 3), loss=lambda outputs, batch: outputs["mean"])


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


def test_the_metrics_of_one_draw_are_named(caplog: pytest.LogCaptureFixture) -> None:
    data = (drawn(SAMPLES, 3), drawn(SAMPLES, 2))
    metrics_of(load(nn.Linear(3, 2), data=data, loss=lambda o, t: (o + torch.rand_like(o) - t).square().mean(dim=1)))
    assert "these are the values of one draw" in caplog.text


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


class Tagger(nn.Module):
    """Its outputs are as long as the longest sequence of the mini-batch, not as the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return cast(Tensor, self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]))


def tagged() -> list[tuple[Tensor, Tensor, Tensor]]:
    batches = []
    for lengths in ([2, 3, 6], [4, 1, 2]):
        words = pad_sequence([torch.arange(n) + 1 for n in lengths], batch_first=True)
        tags = pad_sequence([torch.arange(n) % 3 for n in lengths], batch_first=True, padding_value=-100)
        batches.append((words, torch.tensor(lengths), tags))
    return batches


def test_a_padded_mini_batch_is_not_cut_and_padding_does_not_count_as_an_error() -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets)

    torch.manual_seed(0)
    model = Tagger()
    metrics = metrics_of(load(model, data=tagged(), loss=mean))
    losses, shares = [], []
    for words, lengths, tags in tagged():
        outputs = model(words, lengths)
        losses.append(mean(outputs, tags).item())
        hits = outputs.argmax(dim=2) == tags
        shares += [hits[i, : lengths[i]].double().mean().item() for i in range(3)]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(np.mean(shares), rel=1e-6)


@pytest.mark.parametrize("flat_losses", [True, False])
def test_losses_of_padding_are_refused(flat_losses: bool) -> None:
    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses.flatten() if flat_losses else losses

    with pytest.raises(ValueError, match=r"a loss for each of 18 tokens, 7 of which are padding"):
        load(Tagger(), data=tagged(), loss=each)


def test_losses_of_the_real_tokens_have_no_accuracy() -> None:
    def real(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[targets >= 0], targets[targets >= 0], reduction="none")

    metrics = metrics_of(load(Tagger(), data=tagged(), loss=real))
    assert metrics["samples"] == 18
    assert "accuracy" not in metrics


def test_masks_with_ignored_pixels_are_targets() -> None:
    def dense(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)

    torch.manual_seed(0)
    model, pictures = nn.Conv2d(3, 2, 1), drawn(4, 3, 5, 5)
    masks = torch.arange(25).view(1, 5, 5).expand(4, 5, 5) % 2
    masks = torch.where(drawn(4, 5, 5) > 1, -100, masks)
    found = load(model, data=(pictures, masks), loss=dense).objective(0).item()
    assert found == pytest.approx(dense(model(pictures), masks).mean().item(), rel=1e-6)


class OptionalMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.head(src + tgt if mask is None else (src + tgt) * mask))


def test_a_tuple_that_may_or_may_not_hold_an_optional_input_is_refused() -> None:
    x, mask, y = drawn(SAMPLES, 3), torch.ones(SAMPLES, 3), torch.arange(SAMPLES) % 2
    with pytest.raises(ValueError, match="not clear which are inputs"):
        load(OptionalMask(), data=(x, x, mask, y))
    assert metrics_of(load(OptionalMask(), data=((x, x, mask), y)))["samples"] == SAMPLES


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (nn.Conv2d(3, 2, 1), (drawn(4, 3, 5, 5), torch.zeros(4, 5, 5).long()), "--loss file.py:function"),
        (nn.Conv2d(3, 2, 1), (drawn(4, 5, 5, 3), torch.zeros(4).long()), r"lie as \(N, H, W, C\): return each as"),
    ],
)
def test_pictures_that_do_not_fit_the_default_are_explained(model: nn.Module, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(model, data=data)


def test_a_loss_of_targets_that_the_data_do_not_name_is_explained() -> None:
    data = [{"image": drawn(4, 3, 5, 5), "mask": torch.zeros(4, 5, 5).long()}]
    with pytest.raises(ValueError, match=r"the fields image, mask: give it the parameters \(outputs, batch\)"):
        load(nn.Conv2d(3, 2, 1), data=data, loss=lambda outputs, targets: F.cross_entropy(outputs, targets))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return cast(Tensor, (self.features(first) - self.features(second)).flatten(1).square().mean(1, keepdim=True))


def test_feature_maps_of_two_pictures_are_scaled_by_the_pictures() -> None:
    data = [(drawn(4, 1, 8, 8), drawn(4, 1, 8, 8, seed=1), torch.tensor([0.0, 1, 0, 1])) for _ in range(2)]
    found = measure("fourier", load(Siamese(), data=data, loss="mse"), out=None, quiet=True)
    assert found.scale.values.tolist() == [1.0] * found.sizes["layer"]


@pytest.mark.parametrize("form", ["whole", "items", "batches", "tuples"])
def test_a_loss_of_the_batch_gets_entries_that_the_model_does_not_take(form: str) -> None:
    parts = {"x": drawn(SAMPLES, 3), "y": torch.arange(SAMPLES) % 2, "w": drawn(SAMPLES, seed=1).exp()}
    items = [{name: tensor[i] for name, tensor in parts.items()} for i in range(SAMPLES)]
    batches = [{name: tensor[i : i + 5] for name, tensor in parts.items()} for i in range(0, SAMPLES, 5)]
    data: Any = {"whole": parts, "items": items, "batches": batches, "tuples": TensorDataset(*parts.values())}[form]

    def weighted_entropy(outputs: Tensor, batch: Any) -> Tensor:
        targets, weights = (batch["y"], batch["w"]) if isinstance(batch, dict) else batch[1:]
        return weights * F.cross_entropy(outputs, targets, reduction="none")

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wanted = (parts["w"] * F.cross_entropy(model(parts["x"]), parts["y"], reduction="none")).mean().item()
    assert metrics_of(load(model, data=data, loss=weighted_entropy))["loss"] == pytest.approx(wanted, rel=1e-6)

"""Losses of a user: what they are called with, what they may return, what identifies them."""

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from shapes import SAMPLES, GraphNetwork, drawn, graphs
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from landscape.api import measure
from landscape.predictions.evaluation import metrics_of
from landscape.products.vectors import flat
from landscape.results.headline_numbers import measured
from landscape.results.protocols import protocol_of
from landscape.subject.loading.load import load
from landscape.subject.losses import class_accuracy


@pytest.mark.slow
def test_a_loss_that_returns_a_mean_has_values_without_errors(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    each = load(model, data=data, loss=F.cross_entropy, batch_size=5)
    mean = load(model, data=data, loss=lambda z, y: F.cross_entropy(z, y), batch_size=5)
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


PAIR = (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
MASKS = [{"image": drawn(4, 3, 5, 5), "mask": torch.zeros(4, 5, 5).long()}]
FAILED = "the loss failed with (Index|Type)Error"


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        (PAIR, lambda outputs, targets: outputs, r"the loss returned \(2, 2\) for 2 samples, expected one loss per"),
        (PAIR, lambda outputs, targets: outputs["logits"], FAILED),
        (PAIR, lambda model, batch: model(batch), FAILED),
        (PAIR, lambda o, t: F.cross_entropy(o, t, reduction="sum"), "returns the sum over the mini-batch"),
        (PAIR[0], lambda outputs, batch: outputs["mean"], FAILED),
        (MASKS, lambda outputs, targets: F.cross_entropy(outputs, targets),
         r"the fields image, mask: give it the parameters \(outputs, batch\)"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_work_is_refused_in_one_line(data: Any, loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(nn.Conv2d(3, 2, 1) if data is MASKS else nn.Linear(3, 2), data=data, loss=loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_that_draws_its_noise_is_refused(whole: bool) -> None:
    def of_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs + torch.randn_like(outputs) - targets).square().mean(dim=1)

    def of_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return of_outputs(model(batch[0]), batch[1])

    subject = load(nn.Linear(3, 2), data=(drawn(SAMPLES, 3), drawn(SAMPLES, 2)), loss=of_model if whole else of_outputs)
    with pytest.raises(ValueError, match="draws random numbers in evaluation mode"):
        measure("hessian", subject, out=None, quiet=True)
    with pytest.raises(ValueError, match=r"or its loss, draws random numbers.*draw the noise with the data$"):
        metrics_of(subject)


@pytest.mark.slow
def test_a_loss_made_in_python_is_not_taken_for_cross_entropy() -> None:
    def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
        return -outputs.softmax(1).gather(1, targets[:, None])

    torch.manual_seed(0)
    model, data = nn.Linear(3, 3), (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 3)
    subjects = [load(model, data=data, loss=loss) for loss in (confidence, "cross-entropy")]
    own, default = (measure("surface", one, out=None, resolution=3, quiet=True) for one in subjects)
    name = f"{test_a_loss_made_in_python_is_not_taken_for_cross_entropy.__name__}.<locals>.confidence"
    assert [protocol_of(data).facts["loss"] for data in (own, default)] == [name, "cross-entropy"]
    assert f"loss {name}" in own.attrs["protocol"]
    negative, positive = ({one.name: one for one in measured(data)}["loss"] for data in (own, default))
    assert negative.value < 0
    assert negative.high - negative.value == pytest.approx(negative.value - negative.low)
    assert positive.value**2 == pytest.approx(positive.low * positive.high)  # on the logarithm


@pytest.mark.slow
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
    found = measure("hessian", subject, out=None, top=1, tol=1e-8, quiet=True).eigenvalue.item()
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


@pytest.mark.slow
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


@pytest.mark.parametrize(("shape", "first"), [((2, 3, 2, 2), 1), ((2, 4, 3), 2)])
def test_targets_that_are_no_class_of_the_outputs_do_not_count_as_wrong(shape: tuple[int, ...], first: int) -> None:
    outputs = drawn(*shape)
    targets = outputs.argmax(dim=first)
    targets.view(2, -1)[:, 1:3] = torch.tensor([[255, -100], [3, 0]])
    right = (outputs.argmax(dim=first) == targets).view(2, -1).double()
    wanted = [1.0, right[1, [0, 2, 3]].mean().item()]  # of the last image 3 numbers are classes
    assert class_accuracy(outputs, targets).tolist() == pytest.approx(wanted)


def test_a_loss_of_targets_that_are_no_classes_has_no_accuracy_and_says_so() -> None:
    data = (drawn(SAMPLES, 3), drawn(SAMPLES, 2, seed=1))
    subject = load(nn.Linear(3, 2), data=data, loss=lambda outputs, targets: (outputs - targets).square().mean(dim=1))
    found = measure("line", subject, out=None, resolution=3, quiet=True)
    assert found.accuracy.isnull().all()
    assert found.accuracy.attrs["units"] == "undefined"
    assert found.accuracy.attrs["long_name"] == "accuracy (none: outputs and targets are not one class per sample)"


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_may_take_class_numbers_below_0_which_have_no_accuracy(whole: bool) -> None:
    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - targets * (outputs[:, 1] - outputs[:, 0])).clamp_min(0)

    def of_batch(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return hinge(outputs, batch["target"])

    x, y, model = drawn(SAMPLES, 3), torch.arange(SAMPLES) // (SAMPLES // 2) * -2 + 1, nn.Linear(3, 2)
    assert y[:2].tolist() == [1, 1]  # what the first samples show
    subject = load(model, data={"input": x, "target": y} if whole else (x, y), loss=of_batch if whole else hinge)
    found = metrics_of(subject)
    assert found["loss"] == pytest.approx(hinge(model(x), y).mean().item(), rel=1e-6)
    assert "accuracy" not in found
    with pytest.raises(ValueError, match=r"has the target -1; .* or give the loss of these targets with --loss"):
        load(model, data=(x, y))

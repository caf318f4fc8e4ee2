"""Objectives other than cross-entropy: named losses and user functions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from analytic import run_probe
from torch import Tensor, nn

import landscape
from landscape.data.structure import logits_in
from landscape.plots.drawing import draw
from landscape.predictions.evaluation import metrics_of
from landscape.probe import Quantity
from landscape.probes.hessian import Hessian
from landscape.products.chunked_cross_entropy import chunked_cross_entropy
from landscape.running.run import digest
from landscape.subject.loading.identity import identity, protocol
from landscape.subject.losses import CLASSIFICATION, MEANINGS, NAMES, bce, cross_entropy, loss_of
from landscape.subject.subject import Subject

REGRESSION = """
import torch
from torch import nn

torch.manual_seed(0)
INPUTS = torch.randn(12, 4)

def data():
    return INPUTS, INPUTS.sum(dim=1) + 0.1

def net():
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))

def huber(outputs, targets):
    return nn.functional.huber_loss(outputs, targets, reduction="none")

def rows(outputs, targets):
    return outputs[:, None].expand(-1, 3)

def broken(outputs, targets):
    raise KeyError("no such thing")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REGRESSION)
    return path


def _loaded(file: Path, loss: str) -> Subject:
    return landscape.load(None, model=f"{file}:net", data=f"{file}:data", batch_size=6, loss=loss, device="cpu")


def test_named_losses_are_their_formulas() -> None:
    outputs = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, -2.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    share = 1 / (1 + np.exp(-outputs.numpy()))
    t = targets.numpy()
    bce = -(t * np.log(share) + (1 - t) * np.log(1 - share)).mean(axis=1)
    np.testing.assert_allclose(NAMES["bce"](outputs, targets), bce, rtol=1e-12)
    np.testing.assert_allclose(NAMES["mse"](outputs, targets), ((outputs.numpy() - t) ** 2).mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(NAMES["mse"](outputs[:, :1], targets[:, 0]), [0.25, 0.0], rtol=1e-12)
    error = np.abs(outputs.numpy() - t)
    np.testing.assert_allclose(NAMES["l1"](outputs, targets), error.mean(axis=1), rtol=1e-12)
    huber = np.where(error <= 1, error**2 / 2, error - 0.5).mean(axis=1)
    np.testing.assert_allclose(NAMES["huber"](outputs, targets), huber, rtol=1e-12)
    log_sum = np.log(np.exp(outputs.numpy()).sum(axis=1))
    expected = log_sum - outputs.numpy()[[0, 1], [2, 1]]
    np.testing.assert_allclose(NAMES["cross-entropy"](outputs, torch.tensor([2, 1])), expected, rtol=1e-12)


@pytest.mark.parametrize("operator", ["hessian", "ggn"])
def test_the_hessian_of_least_squares_is_that_of_its_normal_equations(file: Path, operator: str) -> None:
    subject = _loaded(file, "mse")
    subject.model.double()
    found = run_probe(Hessian(top=5, tol=1e-8, operator=operator), subject)  # type: ignore[arg-type]
    for i in range(2):
        inputs, _ = subject.batch(i)
        rows = torch.cat([inputs, torch.ones(6, 1, dtype=torch.float64)], dim=1)
        expected = torch.linalg.eigvalsh(2 * rows.T @ rows / 6).flip(0)
        np.testing.assert_allclose(found["eigenvalue"][i], expected, rtol=1e-9, atol=1e-12)


def test_a_user_loss_enters_the_objective_the_protocol_and_the_run_key(file: Path) -> None:
    huber, mse = (_loaded(file, loss) for loss in (f"{file}:huber", "mse"))
    inputs, targets = huber.batch(0)
    expected = nn.functional.huber_loss(huber.model(inputs), targets)
    assert huber.objective(0).item() == pytest.approx(expected.item(), rel=1e-6)
    assert "loss mine.py:huber" in protocol(huber)
    assert huber.meaning.units == "loss"  # they are not known
    before = digest(Hessian(), huber)
    assert before != digest(Hessian(), mse)
    moved = file.with_name("elsewhere.py")
    moved.write_text(REGRESSION)
    assert digest(Hessian(), _loaded(moved, f"{moved}:huber")) == before
    moved.write_text(REGRESSION + "# edited\n")
    assert digest(Hessian(), _loaded(file, f"{moved}:huber")) != before


@pytest.mark.parametrize("name", ["mse", "l1", "huber", "bce"])
def test_targets_of_another_size_are_refused_not_broadcast(name: str) -> None:
    with pytest.raises(ValueError, match=r"returns \(4, 3\) for targets \(4,\), expected a number for each"):
        NAMES[name](torch.zeros(4, 3), torch.zeros(4))


def test_every_loss_defines_its_accuracy() -> None:
    outputs = torch.tensor([[0.5, -1.0, 2.0], [-1.0, 3.0, -2.0]])
    labels = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert MEANINGS[NAMES["bce"]].right(outputs, labels).tolist() == pytest.approx([2 / 3, 1.0])
    assert CLASSIFICATION.right(outputs, torch.tensor([2, 0])).tolist() == [True, False]
    assert CLASSIFICATION.right(outputs, labels).tolist() == [False, True]
    for name in ("mse", "l1", "huber"):
        assert MEANINGS[NAMES[name]].right(outputs, labels).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "units"), [("mse", "squared error"), ("l1", "absolute error"), ("huber", "Huber loss")]
)
def test_a_regression_has_its_own_units_and_no_accuracy(file: Path, tmp_path: Path, loss: str, units: str) -> None:
    subject = _loaded(file, loss)
    found = landscape.measure("surface", subject, out=tmp_path / "r.h5", resolution=3)
    assert {found[name].attrs["units"] for name in ("loss", "loss_se", "rise_se", "height", "persistence")} == {units}
    assert found["accuracy"].attrs["units"] == "undefined"
    assert "a regression has no classes" in found["accuracy"].attrs["long_name"]
    assert np.isnan(found["accuracy"]).all()
    line = landscape.measure("line", subject, out=tmp_path / "r.h5", resolution=3)
    assert line["loss"].attrs["units"] == units
    spectrum = landscape.measure("hessian", subject, out=tmp_path / "r.h5", top=1)
    assert spectrum["loss"].attrs["units"] == units
    assert set(metrics_of(subject)) == {"samples", "loss", "loss_se"}
    if loss == "mse":  # figures do not know which regression it is
        names = ("surface", "line", "hessian")
        assert [path.stem for path in draw(tmp_path / "r.h5", tmp_path, figures=names)] == [*names]


def test_classification_keeps_its_units_and_its_run_key_which_another_function_changes() -> None:
    def halved(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * NAMES["cross-entropy"](outputs, targets)

    model, batches = nn.Linear(3, 2), [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    plain, named = Subject(model, batches), Subject(model, batches, losses=loss_of("cross-entropy").function)
    assert plain.meaning.units == "nats"
    assert plain.meaning.of_accuracy("accuracy") == Quantity("accuracy")
    assert not {"accuracy", "loss"} & set(identity(plain, ()))  # as it was before there were others
    assert digest(Hessian(), plain) == digest(Hessian(), named)
    assert digest(Hessian(), plain) != digest(Hessian(), Subject(model, batches, losses=halved))


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None


@dataclass
class Regressed:
    value: Tensor


class Pair(NamedTuple):
    auxiliary: Tensor
    logits: Tensor


def test_logits_are_found_by_one_rule() -> None:
    logits, other = torch.ones(2, 3), torch.zeros(2, 3)
    for returned in (
        logits, (logits, other), [logits], (None, logits, other), {"hidden": other, "logits": logits},
        Answer(logits, other), Pair(other, logits), SimpleNamespace(logits=logits), {"last_hidden_state": logits},
    ):  # fmt: skip
        assert logits_in(returned) is logits
    for nothing in (
        {"out": logits},
        {"last_hidden_state": logits[None]},
        Regressed(logits),
        (),
        None,
        "logits",
        {"loss": 1.0},
    ):
        with pytest.raises(ValueError, match="nothing named logits; wrap it so that it returns logits"):
            logits_in(nothing)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda file: f"{file}:rows", r"returned \(2, 3\) for 2 samples, expected one loss per sample, \(2,\)"),
        (lambda file: f"{file}:broken", "--loss .*broken failed with KeyError: 'no such thing'"),
        (lambda file: f"{file}:nothing", "has no callable 'nothing'"),
        (lambda file: "crossentropy", r"--loss must be cross-entropy, nll, .*, or file\.py:callable, got crossentropy"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_in_one_line(
    file: Path, loss: Callable[[Path], str], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _loaded(file, loss(file))
    assert "\n" not in str(caught.value)


MISFITS = """
import torch
from torch import nn

INPUTS, HALF = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2

def net(outputs=1): return nn.Linear(4, outputs)
def flat(): return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
def column(): return INPUTS, INPUTS[:, :1]
def numbers(): return INPUTS, INPUTS[:, 0]
def binary(): return INPUTS, HALF
def labels(): return INPUTS, HALF.float()[:, None]
def three(): return INPUTS, torch.arange(12) % 3
def vectors(): return INPUTS, INPUTS[:, :3]
def several(): return INPUTS, torch.ones(12, 3)
def every(): return INPUTS, torch.ones(12, 3, dtype=torch.int64)
def hot(): return INPUTS, torch.eye(3, dtype=torch.int64)[three()[1] % 3]
def floats(): return INPUTS, three()[1].float()
def squeezed(): return INPUTS, three()[1][:, None]
def pairs(): return INPUTS, INPUTS[:, :2]
def soft(): return INPUTS, torch.softmax(INPUTS[:, :3], 1).half()
"""


@pytest.mark.parametrize("named", ["", "cross-entropy"])
@pytest.mark.parametrize(
    ("model", "outputs", "data", "said"),
    [
        ("net", 1, "column", r"one output is always 0; give --loss mse \(or l1, huber\) for a regression"),
        ("net", 1, "numbers", "one output is always 0; give --loss mse"),
        ("flat", None, "numbers", "one output is always 0; give --loss mse"),
        ("net", 1, "binary", "one output is always 0; give --loss bce for labels from 0 to 1, or --loss mse"),
        ("net", 1, "labels", "one output is always 0; give --loss bce for labels from 0 to 1, or --loss mse"),
        ("net", 1, "three", "one output is always 0; let the model return one output per class"),
        ("net", 3, "vectors", r"targets \(12, 3\) float32: rows do not sum to 1, .*give --loss mse for a regression"),
        ("net", 3, "several", "rows do not sum to 1, .*give --loss bce for several labels per sample"),
        ("net", 3, "every", "they are not class numbers .*give --loss bce for several labels per sample"),
        ("net", 3, "hot", r"one-hot integers are no class numbers .*; return targets.argmax\(1\), or targets.float"),
        ("net", 3, "floats", r"class numbers \(samples,\) as integers; return targets\.long\(\)"),
        ("net", 3, "squeezed", r"class numbers \(samples,\) as integers; return targets\[:, 0\]\.long\(\)"),
        ("net", 3, "pairs", "for a regression let the model return as many numbers as the targets have"),
    ],
)
def test_cross_entropy_without_classes_is_refused_and_another_loss_named(
    tmp_path: Path, named: str, model: str, outputs: int | None, data: str, said: str
) -> None:
    (path := tmp_path / "mine.py").write_text(MISFITS)
    arguments = {} if outputs is None else {"outputs": outputs}
    with pytest.raises(ValueError, match=said):
        landscape.load(None, model=f"{path}:{model}", model_arg=arguments, data=f"{path}:{data}", loss=named)


def test_soft_targets_and_labels_fit_their_losses(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(MISFITS)
    for outputs, data, loss in ((3, "soft", ""), (3, "three", ""), (1, "binary", "bce"), (3, "several", "bce")):
        options = {"model": f"{path}:net", "model_arg": {"outputs": outputs}}
        subject = landscape.load(None, data=f"{path}:{data}", loss=loss, **options)
        assert metrics_of(subject)["loss"] > 0
    with pytest.raises(ValueError, match=r"--loss bce needs targets from 0 to 1, those of .* lie between 0 and 2"):
        landscape.load(None, model=f"{path}:net", data=f"{path}:three", loss="bce")


def test_a_linear_probe_needs_classes(tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text(MISFITS)
    for data in ("column", "several"):
        with pytest.raises(ValueError, match="a linear classifier needs classes, got real-valued targets"):
            landscape.measure("probe-linear", model=f"{path}:net", data=f"{path}:{data}", out=tmp_path / "r.h5")


FITTED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], Tensor]] = {
    "classes": (cross_entropy, (4, 3), torch.zeros(4, dtype=torch.long)),
    "sequences": (cross_entropy, (2, 2, 3), torch.tensor([[0, 0], [0, -100]])),
    "maps": (cross_entropy, (2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.long)),
    "labels": (bce, (4, 3), torch.ones(4, 3)),
    "chunks": (lambda z, y: chunked_cross_entropy(z, torch.eye(3, dtype=z.dtype), None, y), (2, 2, 3),
               torch.tensor([[0, 0], [0, -100]])),
    "function": (lambda z, y: given(nn.functional.cross_entropy)(z, y), (4, 3), torch.zeros(4, dtype=torch.long)),
    "module": (lambda z, y: given(nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3])))(z, y), (4, 3),
               torch.zeros(4, dtype=torch.long)),
    "partial": (lambda z, y: given(partial(nn.functional.cross_entropy, weight=torch.tensor([1.0, 2, 3])))(z, y),
                (4, 3), torch.zeros(4, dtype=torch.long)),
}  # fmt: skip


def given(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """One of torch's own losses as loading takes it."""
    samples = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long)
    return landscape.load(nn.Linear(3, 3), data=samples, loss=loss, batch_size=4, classes=3).losses


@pytest.mark.parametrize("name", FITTED)
def test_derivatives_of_a_loss_near_zero_keep_their_digits_in_single_precision(name: str) -> None:
    loss, shape, targets = FITTED[name]
    draw = torch.Generator().manual_seed(0)
    at = torch.randn(shape, generator=draw)
    at.select(1 if name == "maps" else -1, 0).add_(17.0)  # probabilities of the others are about 1e-8
    at = at + 17.0 if name == "labels" else at
    v = torch.randn(shape, generator=draw)

    def derivatives(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        logits = at.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(loss(logits, targets).sum(), logits, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum(), logits)
        return first.detach(), second

    for single, double in zip(derivatives(torch.float32), derivatives(torch.float64), strict=True):
        assert double.abs().max() < 1e-5
        assert (single - double).norm() <= 1e-5 * double.norm()

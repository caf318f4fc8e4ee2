"""Facts about the evaluation of classifiers, against other libraries."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from command_line import Command
from scipy.special import logsumexp, softmax
from torch import Tensor, nn

import landscape
from landscape.predictions.evaluation import evaluate, metrics_of
from landscape.predictions.scores import sample_scores
from landscape.probes.calibration import Calibration
from landscape.statistics.calibration import (
    METRICS,
    Resampled,
    SampleScores,
    bins,
    bootstrap,
    gaps,
    joined,
    paired_difference,
    summary,
    sums,
)
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject


def batches(count: int = 203, classes: int = 7, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(count, classes, generator=generator)
    targets = torch.randint(classes, (count,), generator=generator)
    return list(zip(logits.split(size), targets.split(size), strict=True))


def test_loss_accuracy_top5_and_brier_equal_numpy() -> None:
    data = batches()
    logits = torch.cat([x for x, _ in data]).double().numpy()
    targets = torch.cat([y for _, y in data]).numpy()
    rows = np.arange(len(targets))
    losses = logsumexp(logits, axis=1) - logits[rows, targets]
    ranks = (logits > logits[rows, targets][:, None]).sum(axis=1)
    brier = ((softmax(logits, axis=1) - np.eye(7)[targets]) ** 2).sum(axis=1)
    found = evaluate(nn.Identity(), data)
    assert found["samples"] == 203
    for name, values in {"loss": losses, "accuracy": ranks < 1, "top5": ranks < 5, "brier": brier}.items():
        assert found[name] == pytest.approx(values.mean(), rel=1e-12)
        assert found[f"{name}_se"] == pytest.approx(values.std(ddof=1) / math.sqrt(203), rel=1e-12)


def test_calibration_error_equals_a_histogram_of_gaps() -> None:
    data = batches()
    logits, targets = (torch.cat(parts).numpy() for parts in zip(*data, strict=True))
    confidence = softmax(logits.astype(np.float64), axis=1).max(axis=1)
    gaps, _ = np.histogram(confidence, 10, (0, 1), weights=confidence - (logits.argmax(axis=1) == targets))
    assert evaluate(nn.Identity(), data)["ece"] == pytest.approx(np.abs(gaps).sum() / 203, rel=1e-12)


TIED = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1 - 1e-12])  # shares at the edges of the bins of confidence


@pytest.mark.parametrize("seed", range(20))
def test_evaluate_prints_the_numbers_that_calibration_stores(seed: int) -> None:
    """Also of tied confidences, and of probabilities of exactly 0 and 1."""
    draw = np.random.default_rng(seed)
    n = draw.integers(2, 60)
    share = np.where(draw.random(n) < draw.random(), draw.choice(TIED, n), draw.random(n))
    certain = np.where(draw.random(n) < 0.2, draw.choice([-1000.0, 1000.0], n), np.log(share / (1 - share)))
    logits, targets = np.stack([certain, np.zeros(n)], axis=1), draw.integers(2, size=n)
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data.copy_(torch.eye(2))
    data = torch.from_numpy(logits), torch.from_numpy(targets)
    subject = load(model, data=data, batch_size=int(draw.integers(1, 60)))
    stored, found = Calibration(draws=2).reduce(as_stored(subject)), metrics_of(subject)
    for name in ("accuracy", "top5", "brier", "ece"):
        assert found[name] == stored[name], name
    assert found["loss"] == stored["nll"]


def as_stored(subject: Subject) -> dict[str, np.ndarray]:
    """What a results file holds of the units of a calibration."""
    probe = Calibration(draws=2)
    units = list(probe.plan(subject).units())
    values = list(probe.sweep(subject, units))
    return {"done": np.ones(len(units)), **{name: np.stack([one[name] for one in values]) for name in values[0]}}


def test_the_batch_size_and_the_name_of_the_logits_have_no_effect() -> None:
    whole, parts = evaluate(nn.Identity(), batches(size=203)), evaluate(nn.Identity(), batches(size=10))
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-14)
    assert whole["ece"] == pytest.approx(parts["ece"], rel=1e-14)
    assert evaluate(Wrapped(), batches()) == evaluate(nn.Identity(), batches())


def test_it_runs_in_eval_mode_and_restores_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9).eval())
    assert evaluate(model, batches())["loss"] == evaluate(nn.Identity(), batches())["loss"]
    with pytest.raises(ValueError, match="expected classes"):
        evaluate(model, [(torch.zeros(2, 3), torch.zeros(2, 5))])
    assert [module.training for module in model.modules()] == [True, True, False]


def test_one_sample_has_no_standard_error_and_top5_of_three_classes_is_certain() -> None:
    found = evaluate(nn.Identity(), batches(count=1))
    assert math.isfinite(found["loss"])
    assert math.isnan(found["loss_se"])
    assert evaluate(nn.Identity(), batches(classes=3))["top5"] == 1.0


class Wrapped(nn.Module):
    """Returns its logits by name, as models of other libraries do."""

    def forward(self, logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits}


def test_soft_targets_count_by_their_largest_class() -> None:
    soft = [(x, 0.9 * nn.functional.one_hot(y, 7) + 0.1 / 7) for x, y in batches()]
    found, hard = evaluate(nn.Identity(), soft), evaluate(nn.Identity(), batches())
    logits, shares = (torch.cat(parts).double() for parts in zip(*soft, strict=True))
    assert found["loss"] == pytest.approx(-(shares * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-6)
    assert found["brier"] == pytest.approx((logits.softmax(1) - shares).square().sum(1).mean().item(), rel=1e-6)
    assert (found["accuracy"], found["top5"], found["ece"]) == (hard["accuracy"], hard["top5"], hard["ece"])


def test_no_batches_and_targets_that_are_not_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="no batches"):
        evaluate(nn.Identity(), [])
    with pytest.raises(ValueError, match=r"got targets \(203,\) torch.float32"):
        evaluate(nn.Identity(), [(torch.randn(203, 7), torch.randn(203))])


class Drawing(nn.Module):
    """Logits that are drawn anew at every pass, as those of MC dropout are."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(x + torch.randn_like(x))
        return self.drawn[-1]


def test_probabilities_of_several_passes_are_averaged() -> None:
    batches = [(torch.randn(6, 4).double(), torch.randint(4, (6,))) for _ in range(2)]
    model = Drawing()
    state = torch.get_rng_state()
    found = evaluate(model, batches, passes=3, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    probabilities = np.concatenate([
        np.mean([softmax(drawn.numpy(), axis=1) for drawn in model.drawn[3 * i : 3 * i + 3]], axis=0) for i in range(2)
    ])  # fmt: skip
    targets = np.concatenate([t.numpy() for _, t in batches])
    assert found["loss"] == pytest.approx(-np.log(probabilities[np.arange(12), targets]).mean())
    assert found["accuracy"] == (probabilities.argmax(1) == targets).mean()
    assert found["brier"] == pytest.approx(((probabilities - np.eye(4)[targets]) ** 2).sum(1).mean())
    assert evaluate(model, batches, passes=3, seed=5) == found
    assert evaluate(model, batches, passes=3, seed=6) != found


def test_several_passes_of_a_deterministic_network_equal_one_and_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    data = batches(count=8)
    one, three = (evaluate(nn.Identity(), data, passes=passes) for passes in (1, 3))
    assert three["loss"] == pytest.approx(one["loss"], rel=1e-12)
    with pytest.raises(ValueError, match="--passes must be at least 1, got 0"):
        evaluate(nn.Identity(), data, passes=0)
    assert caplog.messages == ["the 3 passes are equal: this network is deterministic at test time, one pass suffices"]


@pytest.mark.slow
def test_evaluate_takes_several_checkpoints(command: Command) -> None:
    files = [f"checkpoints/resnet_demo-digits/{name}.pt" for name in ("final", "init")]
    code, text, _ = command("evaluate", *files, "--samples", "40", "--json")
    found = [json.loads(line) for line in text.splitlines()]
    alone = [json.loads(command("evaluate", file, "--samples", "40", "--json")[1]) for file in files]
    assert code == 0
    assert [one["loss"] for one in found] == [one["loss"] for one in alone]
    assert len({one["label"] for one in found}) == 2


REGRESSION = """
import torch
def model():
    return torch.nn.Linear(3, 2)
def data():
    x = torch.arange(30.0).view(10, 3) / 10
    return x, x[:, :2] ** 2
"""


def test_evaluate_takes_the_loss_of_a_regression(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REGRESSION)
    words = ("--model", f"{tmp_path}/mine.py:model", "--data", f"{tmp_path}/mine.py:data", "--loss", "mse")
    code, text, err = command("evaluate", *words, "--json")
    found = json.loads(text)
    subject = landscape.load(model=words[1], data=words[3], loss="mse")
    with torch.no_grad():
        each = (subject.model(subject.batches[0][0]) - subject.batches[0][1]).square().mean(dim=1).double().numpy()
    assert code == 0
    assert set(found) == {"label", "samples", "loss", "loss_se"}
    assert found["loss"] == pytest.approx(each.mean(), rel=1e-6)
    assert found["loss_se"] == pytest.approx(each.std(ddof=1) / np.sqrt(10), rel=1e-6)
    assert "accuracy" not in err
    assert "warning" not in err


# --- Facts about scores of predicted probabilities, against closed forms and torchmetrics ---


def predictions(count: int = 500, classes: int = 7, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=generator)


def scores(confidence: list[float], correct: list[int]) -> SampleScores:
    zeros = np.zeros(len(confidence))
    return SampleScores(zeros, np.array(correct, float), zeros, zeros, np.array(confidence))


def test_a_confidence_of_one_belongs_to_the_last_bin_and_one_at_an_edge_to_the_bin_below() -> None:
    """Four certain predictions, one of them right: 3/4; a half-open last bin loses all four."""
    logits = torch.tensor([[1000.0, 0, 0]]).repeat(4, 1)
    found = summary(sample_scores(logits, torch.tensor([0, 1, 1, 2])))
    assert (found["ece"], found["ece_signed"]) == (0.75, 0.75)
    assert (found["accuracy_90"], found["uncertainty_90"], found["frequency_90"]) == (0.25, 0.0, 1.0)
    assert bins(sums(scores([1.0, 1.0], [1, 0])).sum(axis=0))["count"].tolist() == [0] * 9 + [2]
    counts = bins(sums(scores([i / 10 for i in range(1, 11)], [1] * 10)).sum(axis=0))["count"]
    assert counts.tolist() == [1] * 10
    assert summary(scores([0.9, 0.91], [1, 1]))["frequency_90"] == 0.5


def test_signed_calibration_error_and_the_statistics_at_09_by_hand() -> None:
    """Bin (0.5, 0.6] with 1.1 - 1 and bin (0.9, 1] with 1.9 - 2 over four samples: gaps cancel in the signed form."""
    found = summary(scores([0.55, 0.55, 0.95, 0.95], [1, 0, 1, 1]))
    assert found["ece"] == pytest.approx(0.05)
    assert found["ece_signed"] == pytest.approx(0.0)
    by_sample = [
        gaps(scores(*one)).mean()
        for one in (([0.55, 0.55, 0.95, 0.95], [1, 0, 1, 1]), ([1.0] * 4, [1, 0, 0, 0]), ([0.5, 0.45], [0, 1]))
    ]
    assert by_sample == pytest.approx([0.05, 3 / 4, (1 - 0.5 - 0.45) / 2])
    assert (found["accuracy_90"], found["uncertainty_90"], found["frequency_90"]) == (1.0, 1.0, 0.5)
    assert math.isnan(summary(scores([0.5], [1]))["accuracy_90"])


def test_a_true_class_of_probability_zero_has_an_infinite_nll() -> None:
    found = sample_scores(torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]]), torch.tensor([0, 0]))
    assert found.nll.tolist() == [0.0, math.inf]
    assert found.brier.tolist() == [0.0, 2.0]
    soft = sample_scores(torch.tensor([[0.0, -math.inf]]), torch.tensor([[1.0, 0.0]]))
    assert (soft.nll.item(), soft.brier.item()) == (0.0, 0.0)


def test_log_probabilities_and_logits_have_the_same_scores() -> None:
    logits, targets = predictions()
    one, other = sample_scores(logits + 5, targets), sample_scores(logits.log_softmax(1), targets)
    for name in ("nll", "brier", "confidence"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-12)
    assert joined([one, other]).nll.shape == (1000,)
    with pytest.raises(ValueError, match="expected classes"):
        sample_scores(logits, targets[:3])


def test_bootstrap_errors_of_means_equal_the_formula() -> None:
    found = sample_scores(*predictions())
    intervals = bootstrap(found, draws=2000)
    assert set(intervals) == set(METRICS)
    wilson = scipy.stats.binomtest(int(found.correct.sum()), 500).proportion_ci(method="wilson")
    assert (intervals["accuracy"].low, intervals["accuracy"].high) == pytest.approx((wilson.low, wilson.high), abs=2e-3)
    for name, values in (("nll", found.nll), ("brier", found.brier)):
        error = values.std() / math.sqrt(500)
        assert intervals[name].error == pytest.approx(error, rel=0.05)
        assert intervals[name].low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
        assert intervals[name].high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_blocks_of_equal_samples_count_once() -> None:
    found = sample_scores(*predictions(100))
    copies = SampleScores(*(np.repeat(getattr(found, name), 9) for name in found.__dataclass_fields__))
    by_block = Resampled.of(np.add.reduceat(sums(copies), np.arange(0, 900, 9)), 1000, 0).interval("nll").error
    assert by_block == pytest.approx(bootstrap(found)["nll"].error, rel=1e-9)
    assert bootstrap(copies)["nll"].error < 0.5 * by_block


def test_paired_differences_cancel_what_both_networks_share() -> None:
    logits, targets = predictions()
    one, other = sample_scores(logits, targets), sample_scores(1.01 * logits, targets)
    value, interval = paired_difference(one, other)["nll"]
    assert value == pytest.approx(float(one.nll.mean() - other.nll.mean()))
    assert interval.error == pytest.approx((one.nll - other.nll).std() / math.sqrt(500), rel=0.1)
    assert interval.error < 0.05 * bootstrap(one)["nll"].error
    with pytest.raises(ValueError, match="500 and 10 samples"):
        paired_difference(one, sample_scores(*predictions(10)))

"""Facts about scores of predicted probabilities, against closed forms and torchmetrics."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from landscape.predictions.scores import sample_scores
from landscape.statistics.calibration import (
    METRICS,
    SampleScores,
    bins,
    bootstrap,
    joined,
    paired_difference,
    summary,
    sums,
)


def predictions(count: int = 500, classes: int = 7, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=generator)


def scores(confidence: list[float], correct: list[int]) -> SampleScores:
    zeros = np.zeros(len(confidence))
    return SampleScores(zeros, np.array(correct, float), zeros, zeros, np.array(confidence))


def test_scores_equal_torchmetrics() -> None:
    # A CPU torch beside a torchvision built for accelerators: RuntimeError, not ImportError.
    metrics = pytest.importorskip("torchmetrics.functional.classification", exc_type=(ImportError, RuntimeError))
    logits, targets = predictions()
    found = summary(sample_scores(logits, targets))
    probabilities = logits.softmax(1)
    ece = metrics.multiclass_calibration_error(probabilities, targets, num_classes=7, n_bins=10, norm="l1")
    assert found["ece"] == pytest.approx(float(ece), abs=1e-6)
    for name, k in (("accuracy", 1), ("top5", 5)):
        wanted = metrics.multiclass_accuracy(probabilities, targets, num_classes=7, top_k=k, average="micro")
        assert found[name] == pytest.approx(float(wanted), abs=1e-6)


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


def test_weights_count_samples() -> None:
    found = sample_scores(*predictions())
    twice = SampleScores(*(np.repeat(getattr(found, name), 2) for name in found.__dataclass_fields__))
    assert summary(found, np.full(500, 2.0)) == pytest.approx(summary(twice))


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


def test_the_interval_of_the_ece_of_a_calibrated_network_reaches_zero() -> None:
    """Its plain percentile interval never would: every resample adds binning noise to that of the sample."""
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.1, 1, 2000)
    found = scores(confidence.tolist(), (generator.uniform(size=2000) < confidence).astype(int).tolist())
    interval = bootstrap(found)["ece"]
    assert interval.low < 0.005
    assert interval.low <= summary(found)["ece"] <= interval.high


def test_blocks_of_equal_samples_count_once() -> None:
    found = sample_scores(*predictions(100))
    copies = SampleScores(*(np.repeat(getattr(found, name), 9) for name in found.__dataclass_fields__))
    by_block = bootstrap(copies, blocks=np.repeat(np.arange(100), 9))
    assert by_block["nll"].error == pytest.approx(bootstrap(found)["nll"].error, rel=1e-9)
    assert bootstrap(copies)["nll"].error < 0.5 * by_block["nll"].error


def test_paired_differences_cancel_what_both_networks_share() -> None:
    logits, targets = predictions()
    one, other = sample_scores(logits, targets), sample_scores(1.01 * logits, targets)
    value, interval = paired_difference(one, other)["nll"]
    assert value == pytest.approx(float(one.nll.mean() - other.nll.mean()))
    assert interval.error == pytest.approx((one.nll - other.nll).std() / math.sqrt(500), rel=0.1)
    assert interval.error < 0.05 * bootstrap(one)["nll"].error
    with pytest.raises(ValueError, match="500 and 10 samples"):
        paired_difference(one, sample_scores(*predictions(10)))

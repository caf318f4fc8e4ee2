"""The sanity check: when accuracy counts as chance, what is named as the cause, and when nothing is wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measured_runs import save
from scipy import stats
from torch import Tensor, nn

from landscape.cli.main import exit_code
from landscape.subject.loading.sanity_check import (
    LEVEL,
    SanityCheck,
    check_sanity,
    class_order_hint,
    guessing_p_value,
    warning,
)
from landscape.subject.losses import NAMES, LossTraits
from landscape.subject.subject import Subject

CLASSES = 10
TARGETS = torch.arange(200) % CLASSES
INPUTS = nn.functional.one_hot(TARGETS, CLASSES).double() * 3 - 0.3  # mean 0, about


def subject(
    logits: Callable[[Tensor], Tensor] = lambda x: x,
    *,
    inputs: Tensor = INPUTS,
    targets: Tensor = TARGETS,
    loss: str = "cross-entropy",
) -> Subject:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return logits(super().forward(x))

    model = Model(inputs.shape[1], inputs.shape[1], dtype=torch.float64)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    batches = list(zip(inputs.split(50), targets.split(50), strict=True))
    return Subject(model, batches, losses=NAMES[loss], traits=LossTraits(name=loss))


# --- chance ---


@pytest.mark.parametrize(
    ("hits", "samples", "classes"), [(0, 9, 3), (3, 9, 3), (9, 9, 3), (40, 256, 10), (2, 256, 1000)]
)
def test_the_p_value_is_the_tail_of_the_binomial_distribution(hits: int, samples: int, classes: int) -> None:
    wanted = stats.binomtest(hits, samples, 1 / classes, alternative="greater").pvalue
    assert guessing_p_value(hits, samples, classes) == pytest.approx(wanted, rel=1e-9)


def test_false_alarms_are_as_frequent_as_the_level() -> None:
    hits = np.random.default_rng(0).binomial(256, 0.1, size=4000)
    alarms = np.mean([guessing_p_value(int(h), 256, 10) < LEVEL for h in hits])
    assert alarms <= LEVEL + 3 * math.sqrt(LEVEL / 4000)
    assert alarms > LEVEL / 4


def test_trained_weights_are_judged_by_chance_and_initial_or_poor_ones_are_not_warned_of() -> None:
    check = check_sanity(subject())
    assert (check.accuracy, check.samples, check.classes, check.at_chance) == (1.0, 200, CLASSES, False)
    assert warning(check) == ""
    check = SanityCheck(loss=2.3, accuracy=0.1, samples=200, classes=10, p_value=0.5)
    assert warning(check)
    assert warning(check, initial=True) == ""
    assert warning(check, own=0.11) == ""
    assert warning(check, own=0.6)
    assert "weights of another model, initial weights (epoch 0 may be either)" in warning(check, initial=None)
    assert warning(replace(check, p_value=1e-4), own=0.6) == ""


def test_a_guessing_model_is_warned_of_with_the_three_causes() -> None:
    generator = torch.Generator().manual_seed(0)
    guesses = torch.randn(200, CLASSES, dtype=torch.float64, generator=generator)
    check = check_sanity(subject(inputs=guesses))
    said = warning(check, own=0.9)
    assert check.at_chance
    assert check.cause == ""
    assert f"{check.accuracy:.3f} on 200 samples is no better than guessing among 10 classes" in said
    assert f"p = {stats.binomtest(round(check.accuracy * 200), 200, 0.1, alternative='greater').pvalue:.2g}" in said
    assert "own metrics say 0.900" in said
    for cause in ("classes in another order", "another normalisation", "weights of another model"):
        assert cause in said
    assert "\n" not in said


# --- causes ---


def test_losses_that_are_not_finite_are_counted_and_blamed_on_the_sample_and_not_on_the_checkpoint() -> None:
    inputs = INPUTS.clone()
    inputs[70, 3] = torch.nan  # in the second mini-batch
    check = check_sanity(subject(inputs=inputs))
    assert (check.lost, check.samples) == (1, 200)
    assert check.cause == "the inputs of sample 70 of the data are not finite; check --data, --mean and --std"
    said = warning(check, initial=True)
    assert said.startswith("warning: the loss of 1 of 200 samples is not finite")
    assert "the inputs of sample 70 of the data are not finite" in said


def test_another_order_of_the_classes_is_detected() -> None:
    order = torch.tensor([3, 4, 0, 1, 2, 9, 5, 6, 7, 8])
    check = check_sanity(subject(targets=order[TARGETS]))
    assert (check.accuracy, check.at_chance) == (0.0, True)
    assert check.cause.startswith("100% of held-out samples are correct under another class order")
    assert "here 100% of held-out samples" in warning(check)


def test_classes_shifted_by_one_are_detected_among_many_classes() -> None:
    generator = np.random.default_rng(0)
    wanted = generator.integers(1000, size=256)
    predicted = np.where(generator.random(256) < 0.7, wanted + 1, generator.integers(1000, size=256))
    said = "% of the samples are predicted as their class + 1: the class numbers are shifted by one"
    assert said in class_order_hint(predicted, wanted, 1001)
    assert "class - 1" in class_order_hint(wanted, predicted, 1001)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
def test_guesses_have_no_class_order_hint(classes: int) -> None:
    generator = np.random.default_rng(classes)
    for _ in range(50):
        wanted, predicted = generator.integers(classes, size=(2, 256))
        assert class_order_hint(predicted, wanted, classes) == ""


def test_a_single_predicted_class_is_reported() -> None:
    check = check_sanity(subject(lambda x: x * 0 + torch.arange(CLASSES)))
    assert check.accuracy == 0.1
    assert check.cause == "every sample is predicted as class 9, which suggests wrong weights or inputs"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.rand(200, CLASSES, dtype=torch.float64), "they are not normalised by mean and std"),
        (255 * torch.rand(200, CLASSES, dtype=torch.float64), "far from 0 and 1: check mean and std"),
        (torch.randn(200, CLASSES, dtype=torch.float64) / 1000, "far from 0 and 1: check mean and std"),
    ],
)
def test_inputs_that_do_not_look_normalised_are_named(inputs: Tensor, words: str) -> None:
    check = check_sanity(subject(inputs=inputs))
    assert check.at_chance
    assert words in check.cause


# --- no false alarms ---


@pytest.mark.parametrize(
    ("targets", "loss"),
    [
        (torch.linspace(-1, 1, 2000, dtype=torch.float64).view(200, CLASSES), "mse"),  # a regression of ten numbers
        ((torch.arange(2000) % 3 == 0).double().view(200, CLASSES), "bce"),  # several labels per sample
    ],
)
def test_targets_that_are_not_classes_are_not_tested_against_guessing(targets: Tensor, loss: str) -> None:
    check = check_sanity(subject(targets=targets, loss=loss))
    assert math.isnan(check.accuracy) == (loss == "mse")  # of several labels it is the share on their side
    assert not check.at_chance
    assert warning(check) == ""


def test_one_output_has_no_accuracy_and_soft_targets_count_by_their_largest_class() -> None:
    one = torch.randn(200, 1, dtype=torch.float64)
    assert math.isnan(check_sanity(subject(inputs=one, targets=one, loss="mse")).accuracy)
    shares = 0.9 * nn.functional.one_hot(TARGETS, CLASSES).double() + 0.01
    assert check_sanity(subject(targets=shares)).accuracy == 1.0


# --- what the command says ---


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `variance` says about a network of random weights on digits, stored with such entries."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **entries: Any) -> str:
        if entries:
            save(tmp_path / "w.pt", **{"recipe": {}, **entries})
        file = ["w.pt"] if entries else []
        assert exit_code(["variance", *file, *words, "--samples", "200"]) == 0
        return capsys.readouterr().err

    return run


@pytest.mark.slow
def test_weights_at_chance_are_warned_of_unless_they_are_initial_ones(said: Callable[..., str]) -> None:
    text = said(epoch=3.0, metrics={"accuracy": 0.95})
    assert "warning: accuracy 0." in text
    assert "own metrics say 0.950" in text
    assert "warning" not in said("--quiet", epoch=3.0, metrics={"accuracy": 0.95})
    stored = said(epoch=0.0, metrics={"accuracy": 0.1})
    assert "w.pt (state_dict), initial weights, " in stored
    fresh = said("--model", "resnet_demo", "--data", "digits")
    assert "resnet_demo: freshly initialised, " in fresh
    assert "warning" not in stored + fresh

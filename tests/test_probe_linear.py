"""Linear probes: features with and without the classes, which samples are fitted and scored, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import run_probe, same_state, state
from foreign import Encoder
from torch import Tensor, nn

import landscape
from landscape.data.dataset import Batches, Images
from landscape.data.sampling import shuffled
from landscape.layers import linear_classifier
from landscape.layers.linear_classifier import fit_with_best_penalty
from landscape.layers.pooled_features import pooled_features, training_samples
from landscape.options import OptionError
from landscape.probes.probe_linear import ProbeLinear
from landscape.running.run import digest
from landscape.subject.sample_statistics import intact_per_sample
from landscape.subject.spec import Spec, Split
from landscape.subject.subject import Origin, Subject

PROBE = ProbeLinear(layers=("maps", "squared", "mean"))


class Stages(nn.Module):
    """The image, its square, and its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.squared, self.mean = nn.Identity(), nn.Identity(), nn.Identity()
        self.head = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mean(self.squared(self.maps(images).square()).mean((2, 3))))
        return logits


def _images(samples: int, seed: int) -> Images:
    """Noise whose size, but not whose mean, is the class's in the first channel."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(samples) % 2
    inputs = torch.randn(samples, 2, 6, 6, generator=generator, dtype=torch.float64)
    inputs[:, 0] *= 1 + 5 * targets[:, None, None]
    return Images(inputs, targets, "made", 2, 6)


def _subject(model: nn.Module | None = None, *, scored: int = 60, fit: int = 100, batch_size: int = 16) -> Subject:
    def part(split: Split, samples: int | str) -> Images:
        images = _images(fit if split == "train" else scored, seed=int(split == "test"))
        return images.take(np.arange(len(images))[: None if samples == "all" else int(samples)])

    torch.manual_seed(0)
    made = (model or Stages()).double().eval()
    return Subject(made, Batches(part("test", "all"), batch_size), origin=Origin(part=part))


def test_a_layer_with_the_classes_is_accurate_and_one_without_is_at_chance() -> None:
    subject = _subject(scored=200, fit=400)
    found = run_probe(PROBE, subject)
    assert found["name"].tolist() == ["maps", "squared", "mean"]
    assert abs(found["accuracy"][0] - 0.5) < 4 * found["accuracy_se"][0]
    assert found["accuracy"][1:].tolist() == [1.0, 1.0]
    assert found["accuracy_se"][1:].tolist() == [0.0, 0.0]
    assert found["features"].tolist() == [2, 2, 2]
    assert found["facts"]["intact_accuracy"] == intact_per_sample(subject)[1].mean()


def test_numbers_equal_those_of_a_fit_written_out() -> None:
    subject = _subject()
    found = run_probe(ProbeLinear(layers=("maps",), train_samples="80"), subject)
    x = _images(100, seed=0)
    fit, targets = x.inputs[:80].mean((2, 3)), torch.nn.functional.one_hot(x.targets[:80]).double()
    held_out = torch.zeros(80, dtype=torch.bool)
    held_out[torch.from_numpy(shuffled(80)[:16])] = True
    probe, penalty, held_out_accuracy = fit_with_best_penalty(fit, targets, held_out)
    assert subject.images is not None
    right = probe.scores(subject.images.inputs.mean((2, 3))).argmax(1) == subject.images.targets
    hits = right.double().numpy()
    assert found["accuracy"][0] == hits.mean()
    assert found["accuracy_se"][0] == pytest.approx(hits.std(ddof=1) / 60**0.5)
    assert (found["penalty"][0], found["held_out_accuracy"][0]) == (penalty, held_out_accuracy)
    assert found["fitted_accuracy"][0] == (probe.scores(fit).argmax(1) == x.targets[:80]).double().mean()


def test_logistic_regression_is_stored_with_its_convergence() -> None:
    subject = _subject()
    ridge = run_probe(ProbeLinear(layers=PROBE.layers), subject)
    found = run_probe(ProbeLinear(layers=PROBE.layers, solver="lbfgs"), subject)
    x = _images(100, seed=0)
    fit, targets = x.inputs.mean((2, 3)), torch.nn.functional.one_hot(x.targets).double()
    held_out = torch.zeros(100, dtype=torch.bool)
    held_out[torch.from_numpy(shuffled(100)[:20])] = True
    probe, penalty, accuracy = fit_with_best_penalty(fit, targets, held_out, "lbfgs")
    assert subject.images is not None
    right = probe.scores(subject.images.inputs.mean((2, 3))).argmax(1) == subject.images.targets
    assert found["accuracy"][0] == right.double().mean()
    assert (found["penalty"][0], found["held_out_accuracy"][0]) == (penalty, accuracy)
    assert found["gradient"][0] == pytest.approx(linear_classifier.gradient(probe, fit, targets, penalty), rel=1e-6)
    assert (found["converged"] == 1).all()
    assert found["accuracy"][1:].tolist() == [1.0, 1.0]
    assert "gradient" not in ridge
    assert digest(ProbeLinear(solver="lbfgs"), subject) != digest(ProbeLinear(), subject)


def test_the_scored_samples_select_nothing() -> None:
    subject = _subject()
    found = run_probe(PROBE, subject)
    assert subject.images is not None
    flipped = replace(subject.images, targets=1 - subject.images.targets)
    other = run_probe(PROBE, replace(subject, batches=Batches(flipped, 16)))
    for name in ("penalty", "held_out_accuracy", "fitted_accuracy"):
        np.testing.assert_array_equal(other[name], found[name])
    np.testing.assert_allclose(other["accuracy"], 1 - found["accuracy"])


@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_numbers_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    found, other = (run_probe(PROBE, _subject(batch_size=size)) for size in (16, batch_size))
    for name in ("accuracy", "accuracy_se", "penalty"):
        np.testing.assert_allclose(other[name], found[name])


def test_tokens_are_averaged_without_their_prefix_or_are_the_class_token() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), Encoder(grid=(4, 4)))
    subject = _subject(model)
    assert subject.images is not None
    large = replace(subject.images, inputs=torch.nn.functional.interpolate(subject.images.inputs, size=16), size=16)
    subject = replace(subject, batches=Batches(large, 20), origin=Origin(part=lambda split, samples: replace(
        large, inputs=large.inputs.flip(0), targets=large.targets.flip(0))))  # fmt: skip
    kept: list[Tensor] = []
    handle = model[1].encoder.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr, index, operator]
    with torch.no_grad():
        model(large.inputs)
    handle.remove()
    tokens = kept[0]
    for pool, expected in (("mean", tokens[:, 1:].mean(1)), ("cls", tokens[:, 0])):
        probe = ProbeLinear(pool=pool)  # type: ignore[arg-type]
        features, *_ = pooled_features(subject, (), probe.pool)
        torch.testing.assert_close(features[-1], expected)


def test_with_one_set_for_both_splits_fitted_samples_are_not_scored() -> None:
    images = _images(90, seed=0)

    def part(split: Split, samples: int | str) -> Images:
        return images.take(np.arange(90)[: None if samples == "all" else int(samples)])

    subject = Subject(Stages().double().eval(), Batches(part("test", 60), 16), origin=Origin(part=part))
    for samples, rows in (("all", 30), ("20", 20)):
        train = training_samples(subject, samples)
        assert train.images is not None
        assert torch.equal(train.images.inputs, images.inputs[60 : 60 + rows])
    whole = Subject(Stages().double().eval(), Batches(part("test", 85), 16), origin=Origin(part=part))
    with pytest.raises(ValueError, match="samples to fit on besides the 85 that are scored, got 5"):
        PROBE.plan(whole)


@pytest.mark.slow
def test_a_loaded_subject_finds_its_train_split(tmp_path: Path) -> None:
    subject = landscape.load(model="resnet_demo", data="digits", samples=40)
    data = landscape.measure("probe-linear", subject, out=tmp_path / "r.h5", train_samples=200, layers="layer2")
    assert data["accuracy"].dims == ("layer",)
    assert (data["accuracy"] > 0.1).all()
    assert "200 samples" in data.attrs["fitted_on"]
    module = landscape.load(subject.model, data="digits", samples=40)  # a module made in Python has no spec
    other = landscape.measure("probe-linear", module, out=tmp_path / "o.h5", train_samples=200, layers="layer2")
    np.testing.assert_array_equal(other["accuracy"], data["accuracy"])


def test_the_model_is_restored_also_after_an_exception() -> None:
    subject = _subject()
    kept = state(subject.model)
    run_probe(PROBE, subject)
    with pytest.raises(ValueError, match="needs a class token, maps has none"):
        run_probe(ProbeLinear(layers=("maps",), pool="cls"), subject)
    other = replace(subject, batches=[(torch.zeros(2, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 1]))])
    with pytest.raises(RuntimeError):  # the head, after the layers have been heard
        pooled_features(other, PROBE.layers, PROBE.pool)
    assert same_state(subject.model, kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())


def test_impossible_requests_are_errors() -> None:
    with pytest.raises(OptionError, match="--pool must be mean or cls, got max"):
        ProbeLinear(pool="max")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--solver must be ridge or lbfgs, got svm"):
        ProbeLinear(solver="svm")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--train-samples must be at least 10, got 3"):
        ProbeLinear(train_samples="3")
    with pytest.raises(OptionError, match="--split train would score the training samples"):
        PROBE.plan(replace(_subject(), spec=Spec(split="train")))
    with pytest.raises(ValueError, match="the subject's data have no other split"):
        PROBE.plan(replace(_subject(), origin=Origin()))
    masked = [{"x": torch.rand(4, 3), "mask": torch.ones(4, 3)}]
    two = landscape.load(nn.Linear(3, 2), data=masked, loss=lambda outputs, batch: outputs[:, 0])
    with pytest.raises(ValueError, match="needs samples of one input and one class each"):
        training_samples(two, "all")
    subject = _subject()
    assert subject.images is not None
    real = replace(subject.images, targets=torch.rand(60, dtype=torch.float64))
    fit = replace(real, inputs=real.inputs.flip(0))
    losses = {"losses": lambda outputs, targets: outputs[:, 0]}
    with pytest.raises(ValueError, match="needs classes"):
        run_probe(PROBE, Subject(subject.model, Batches(real, 16), origin=Origin(part=lambda *_: fit), **losses))  # type: ignore[arg-type]

"""Classes from a linear classifier of the last layer: the same as a linear probe's, of any network, under noise too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from analytic import run_probe, same_state, state
from torch import Tensor, nn

from landscape.cli.main import exit_code
from landscape.data.dataset import Batches, Images
from landscape.data.recipes import recipe
from landscape.layers.linear_classifier import with_linear_classifier
from landscape.probes.noise import Noise
from landscape.probes.probe_linear import ProbeLinear
from landscape.results import reader
from landscape.subject.loading.identity import asked, digest
from landscape.subject.sample_statistics import per_sample
from landscape.subject.spec import Split
from landscape.subject.subject import Origin, Subject
from landscape.training.train import train

SMALL = {"dim": 8, "depth": 2, "heads": 2, "patch": 4}


class Encoder(nn.Module):
    """Maps, their averages, and a projection whose width is that of no class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.projection = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 5, 3), nn.Linear(5, 7)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.projection(self.second(self.first(images).relu()).relu().mean((2, 3)))
        return out


def _images(samples: int, seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(samples) % 3
    inputs = torch.randn(samples, 2, 8, 8, generator=generator, dtype=torch.float64)
    inputs[:, 0] *= 1 + 2 * targets[:, None, None]
    return Images(inputs, targets, "made", 3, 8)


def _subject(batch_size: int = 16) -> Subject:
    def part(split: Split, samples: int | str) -> Images:
        images = _images(90 if split == "train" else 40, seed=int(split == "test"))
        return images.take(np.arange(len(images))[: None if samples == "all" else int(samples)])

    torch.manual_seed(0)
    return Subject(Encoder().double().eval(), Batches(part("test", "all"), batch_size), origin=Origin(part=part))


@pytest.mark.slow
def test_the_classes_are_those_of_a_linear_probe_of_the_last_layer() -> None:
    subject = _subject()
    kept = state(subject.model)
    readout = with_linear_classifier(subject, "mean", "80")
    loss, right = per_sample(readout.subject)
    probes = run_probe(ProbeLinear(train_samples="80", solver="lbfgs"), subject)
    assert right.mean().item() == probes["accuracy"][-1] > 0.5
    assert readout.gradient == pytest.approx(probes["gradient"][-1], abs=1e-12)
    assert f"{probes['name'][-1]} (mean), fitted to 80 training samples" in readout.in_words
    images = subject.images
    assert images is not None
    with torch.no_grad():
        features = subject.model.second(subject.model.first(images.inputs).relu()).mean((2, 3))  # type: ignore[operator]
        scores = readout.subject.forward.classifier.scores(features)  # type: ignore[attr-defined]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, images.targets, reduction="none"))
    assert same_state(subject.model, kept)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 7])
def test_noise_is_read_by_the_classifier_that_was_fitted_to_clean_samples(size: int) -> None:
    subject, probe = _subject(size), Noise(bands="0.8", eps="3", classifier="linear", train_samples="80")
    found = run_probe(probe, subject)
    readout = with_linear_classifier(_subject(), "mean", "80").subject
    assert readout.images is not None
    added = []
    for batch in range(len(subject.batches)):
        x, _ = subject.batch(batch)
        spectrum = torch.fft.rfft2(probe._signs(subject, batch, x))
        added.append(probe._filtered(spectrum, torch.from_numpy(probe._masks(subject)[0]), 0.0))
    noisy = replace(readout.images, inputs=readout.images.inputs + torch.cat(added))
    (loss, right), (loss_after, right_after) = (
        per_sample(replace(readout, batches=Batches(images, 40))) for images in (readout.images, noisy)
    )
    assert found["facts"]["intact_accuracy"] == right.mean()
    assert found["accuracy_drop"][0] == pytest.approx((right - right_after).mean().item(), abs=1e-12)
    assert found["loss_increase"][0] == pytest.approx((loss_after - loss).mean().item(), rel=1e-9)
    assert found["loss_increase"][0] > 0
    assert f", linear classifier of {found['facts']['classifier'].split()[3]} (mean)" in found["facts"]["protocol"]


@pytest.mark.slow
def test_it_is_another_measurement_and_plain_noise_keeps_its_run_key() -> None:
    subject = _subject()
    own = asked(Noise(bands="0.8"), subject)
    assert not {"classifier", "pool", "train_samples"} & own.keys()
    given = [{}, {"train_samples": "80"}, {"train_samples": "60"}, {"train_samples": "all"}]
    linear = [Noise(bands="0.8", classifier="linear", **one) for one in given]
    keys = [digest(probe, subject) for probe in linear]
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]  # by the samples that are fitted, of which there are 90


@pytest.mark.campaign
def test_encoders_are_compared_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for objective in ("simclr", "mim"):
        made = recipe("demo", epochs=0, objective=objective)
        train("vit_demo", "digits", recipe=made, out=tmp_path / objective, fraction=0.1, model_args=SMALL)
    words = ["noise", "simclr", "mim", "--bands", "0.9", "--samples", "64", "--out", "r.h5", "--quiet"]
    assert exit_code(words) == 1
    assert "noise --classifier linear" in capfd.readouterr().err
    assert exit_code([*words, "--classifier", "linear", "--train-samples", "100"]) == 0
    for label in ("simclr", "mim"):
        ((_, data),) = reader.find("r.h5", "noise", label)
        assert "linear classifier of blocks.1" in data.attrs["protocol"]
        assert 0 < data.attrs["intact_accuracy"] <= 1
        assert np.isfinite(data["accuracy_drop"].values).all()


def test_a_loss_that_is_not_that_of_classes_is_refused() -> None:
    from landscape.subject.losses import mse

    with pytest.raises(ValueError, match="--classifier linear predicts a class per image, by cross-entropy; drop"):
        with_linear_classifier(replace(_subject(), losses=mse), "mean", "80")
    with pytest.raises(ValueError, match="--pool cls needs a class token"):
        with_linear_classifier(_subject(), "cls", "80")

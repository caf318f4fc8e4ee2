"""Training without labels: the two losses, their inputs, resuming, and what the checkpoints of an encoder can do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator, nn

import landscape
from landscape import models
from landscape.checkpoints.checkpoint import read_checkpoint, state_dict_sha256
from landscape.data.dataset import Images
from landscape.data.recipes import Recipe, recipe
from landscape.options import OptionError
from landscape.subject.loading.load import load
from landscape.training.objectives import (
    SimCLR,
    contrastive_loss,
    masked_loss,
    neighbour_accuracy,
    objective_of,
    random_mask,
)
from landscape.training.train import EpochResult, train
from landscape.training.training_set import cropped, grey, turned, view

SOURCE = """
import torch

def bytes(split="train"):
    generator = torch.Generator().manual_seed(len(split))
    targets = torch.arange(60) % 3
    images = torch.randint(80, (60, 3, 8, 8), generator=generator, dtype=torch.uint8)
    images[torch.arange(60), targets] += 120  # the class is a colour
    return torch.utils.data.TensorDataset(images, targets)

def floats():
    return torch.randn(60, 3, 8, 8), torch.arange(60) % 3
"""
SMALL = {"dim": 12, "depth": 2, "heads": 2, "patch": 2}


@pytest.fixture
def source(tmp_path: Path) -> str:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    return f"{file}:bytes"


def short(objective: str, epochs: int = 3, **overrides: float | str) -> Recipe:
    return recipe("demo", **{"objective": objective, "epochs": epochs, "batch_size": 16, **overrides})


def test_the_contrastive_loss_is_its_sum_over_pairs() -> None:
    torch.manual_seed(0)
    z, tau = torch.randn(6, 4, dtype=torch.float64), 0.3
    unit = (z / z.norm(dim=1, keepdim=True)).tolist()
    total = 0.0
    for i in range(6):
        similar = [math.exp(sum(a * b for a, b in zip(unit[i], unit[k], strict=True)) / tau) for k in range(6)]
        partner = i + 1 if i % 2 == 0 else i - 1
        total -= math.log(similar[partner] / (sum(similar) - similar[i]))
    assert contrastive_loss(z, tau).item() == pytest.approx(total / 6, rel=1e-12)


def test_the_masked_loss_counts_the_masked_patches_alone() -> None:
    """Images whose patches are constant, reconstructed as zero: the error of a patch is its absolute value."""
    values = torch.arange(1.0, 9.0).view(2, 1, 2, 2)  # (image, channel, row, column) of patches
    images = values.repeat_interleave(3, 2).repeat_interleave(3, 3)
    mask = torch.tensor([[True, False, False, True], [False, True, False, False]])
    loss = masked_loss(lambda x, m: torch.zeros(2, 4, 9), images, mask)
    assert loss.item() == pytest.approx((1 + 4 + 6) / 3)


@pytest.mark.parametrize(("share", "count"), [(0.6, 10), (0.01, 1), (1.0, 16)])
def test_every_image_has_the_same_number_of_masked_patches(share: float, count: int) -> None:
    mask = random_mask(50, 16, share, Generator().manual_seed(0))
    assert (mask.sum(dim=1) == count).all()
    if 1 < count < 16:
        assert (mask.float().mean(dim=0) - count / 16).abs().max() < 0.3
        assert len({tuple(row) for row in mask.tolist()}) > 40


def test_an_autoencoder_sees_nothing_of_the_masked_patches() -> None:
    torch.manual_seed(0)
    network = objective_of(short("mim")).build("vit_demo", {"classes": 3, "image_size": 8, **SMALL}).eval()
    images, mask = torch.randn(2, 3, 8, 8), random_mask(2, 16, 0.5, Generator().manual_seed(1))
    hidden = mask.view(2, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    with torch.no_grad():
        found = network(images, mask)
        assert found.shape == (2, 16, 3 * 2 * 2)
        assert torch.equal(network(torch.where(hidden, 9.0, images), mask), found)
        assert not torch.equal(network(torch.where(hidden, images, 9.0), mask), found)


def test_views_keep_size_and_type_and_follow_from_the_seed() -> None:
    images = torch.randint(256, (40, 3, 16, 16), generator=Generator().manual_seed(0), dtype=torch.uint8)
    one, same, other = (view(images, seed) for seed in (0, 0, 1))
    assert (one.shape, one.dtype) == (images.shape, torch.uint8)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    greys = (one[:, 0] == one[:, 1]).flatten(1).all(dim=1).double().mean().item()
    assert 0.02 < greys < 0.45  # a probability of 0.2


def test_a_crop_is_a_part_of_the_image() -> None:
    """Of a ramp, a crop is a ramp of smaller slope, mirrored or not."""
    ramp = torch.linspace(0, 1, 32).expand(64, 1, 32, 32).contiguous()
    steps = cropped(ramp, Generator().manual_seed(0))[:, 0, 16].diff(dim=1)[:, 8:24].mean(dim=1) * 31
    assert (steps.abs() <= 1.001).all()
    assert (steps.abs() >= math.sqrt(0.2 * 3 / 4) - 0.01).all()
    assert 0.3 < (steps < 0).double().mean() < 0.7


def test_turning_the_hue_keeps_luma_and_a_full_turn_the_image() -> None:
    x = torch.rand(4, 3, 5, 5, generator=Generator().manual_seed(0))
    turns = torch.tensor([0.0, 0.25, 0.5, 1.0]).view(4, 1, 1, 1)
    found = turned(x, turns)
    torch.testing.assert_close(grey(found), grey(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[[0, 3]], x[[0, 3]], atol=1e-5, rtol=0)
    assert (found[1] - x[1]).abs().max() > 0.05


def test_neighbours_vote_for_their_class() -> None:
    targets = torch.arange(30) % 3
    inputs = torch.eye(3)[targets].view(30, 3, 1, 1) + 0.01 * torch.randn(30, 3, 1, 1, generator=Generator())
    train = Images(inputs, targets, "made up", 3, 1)
    tests = replace(train, inputs=inputs + 0.1)
    assert neighbour_accuracy(lambda x: x.flatten(1), train, tests, batch_size=7) == 1.0
    wrong = replace(tests, targets=(targets + 1) % 3)
    assert neighbour_accuracy(lambda x: x.flatten(1), train, wrong, batch_size=7) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["simclr", "mim"])
def test_a_stopped_run_ends_in_the_weights_of_one_that_was_not(source: str, tmp_path: Path, objective: str) -> None:
    def stop(progress: EpochResult) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    arguments = {"recipe": short(objective), "model_args": SMALL}
    whole = train("vit_demo", source, out=tmp_path / "whole", **arguments)
    with pytest.raises(KeyboardInterrupt):
        train("vit_demo", source, out=tmp_path / "stopped", report=stop, **arguments)
    again = train("vit_demo", source, out=tmp_path / "stopped", **arguments)
    files = {"final.pt", "final_decoder.pt"} if objective == "mim" else {"final.pt"}
    for name in files:
        one, other = (read_checkpoint(path.with_name(name)) for path in (whole, again))
        assert state_dict_sha256(one.state_dict) == state_dict_sha256(other.state_dict)
        assert one.metrics == other.metrics
    assert {path.name for path in whole.parent.glob("final*")} == files
    with pytest.raises(ValueError, match=r"holds another run .*recipe objective"):
        train("vit_demo", source, out=tmp_path / "whole", recipe=short("classification"), model_args=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["simclr", "mim"])
def test_an_encoder_learns_and_is_measured_without_a_classifier(source: str, tmp_path: Path, objective: str) -> None:
    results: list[EpochResult] = []
    settings = short(objective, epochs=8, lr=4e-3)
    final = train("vit_demo", source, out=tmp_path / "run", recipe=settings, model_args=SMALL, report=results.append)
    assert results[-1].loss < results[0].loss - 0.03
    stored = read_checkpoint(final)
    assert set(stored.metrics) == {"loss", "neighbour_accuracy"}
    assert stored.metrics["neighbour_accuracy"] > 0.6  # a third by guessing
    encoder = set(models.build("vit_demo", classes=3, image_size=8, **SMALL).state_dict())
    assert set(stored.state_dict) == {name for name in encoder if not name.startswith("head.")}
    options = {"data": source, "out": None, "quiet": True, "samples": 24}
    probed = landscape.measure("probe-linear", final, train_samples=36, **options)
    assert probed["accuracy"].values.max() > 0.6
    assert np.isnan(probed.attrs["intact_accuracy"])  # the classifier is not trained
    measured = landscape.features(final, probes=("fourier", "variance", "similarity", "attention"), **options)
    assert all(np.isfinite(measured["attention"]["distance"].values).ravel())
    with pytest.raises(ValueError, match=rf"trained without labels \({objective}\) and has no classifier; measure it"):
        load(final, data=source)


@pytest.mark.slow
def test_the_decoder_of_masked_images_is_measured_behind_its_encoder(source: str, tmp_path: Path) -> None:
    final = train("vit_demo", source, out=tmp_path / "run", recipe=short("mim", epochs=1, decoder=2), model_args=SMALL)
    options = {"data": source, "out": None, "quiet": True, "samples": 8}
    data = landscape.measure("fourier", final.with_name("final_decoder.pt"), **options)
    names = data["name"].values.tolist()
    assert names[-4:] == ["decoder.0.attention", "decoder.0.mlp", "decoder.1.attention", "decoder.1.mlp"]
    encoder = landscape.measure("fourier", final, **options)
    assert encoder["name"].values.tolist() == names[:-4]
    np.testing.assert_allclose(
        data["high_frequency"].values[:-4], encoder["high_frequency"].values, rtol=1e-5, atol=1e-6
    )


def test_a_convolutional_network_learns_from_two_views() -> None:
    network = SimCLR(short("simclr")).build("resnet_demo", {"classes": 3, "image_size": 8})
    assert isinstance(network.get_submodule("fc"), nn.Sequential)
    assert network(torch.randn(2, 3, 8, 8)).shape == (2, 64)


@pytest.mark.slow
def test_the_rows_of_an_update_keep_their_pairs_when_it_is_divided(source: str, tmp_path: Path) -> None:
    """Without other images in its part, the loss of a pair of one image would be zero; two images have one each."""
    accumulated = short("simclr", epochs=1, batch_size=8, accumulate=2)
    results: list[EpochResult] = []
    train("vit_demo", source, out=tmp_path / "a", recipe=accumulated, model_args=SMALL, report=results.append)
    assert 0.5 < results[0].train_loss < math.log(15) + 1


def test_what_cannot_be_trained_without_labels_is_explained(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--objective mim masks the patches of a ViT, resnet_demo is"):
        train("resnet_demo", source, recipe=short("mim"), out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"--objective simclr augments pixels, .* gives torch.float32"):
        train("vit_demo", source.replace(":bytes", ":floats"), recipe=short("simclr"), out=tmp_path / "run")
    with pytest.raises(OptionError, match=r"--mixup 0\.8 belongs to labels; drop it for --objective simclr"):
        recipe("cifar-vit", objective="simclr", mixup=0.8)
    with pytest.raises(OptionError, match="--objective must be classification, simclr or mim, got moco"):
        recipe("demo", objective="moco")
    assert recipe("cifar-vit", objective="mim").mixup == 0.0

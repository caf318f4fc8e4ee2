"""Consistency along sequences: its definition, files of CIFAR-10-P, generated sequences, bad input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar_files import write_test_images
from torch import Tensor, nn

import landscape
from landscape.data import perturbations
from landscape.data.dataset import Batches, Images
from landscape.options import OptionError
from landscape.probes.perturbation import Perturbation, rows_of
from landscape.subject.loading.identity import digest
from landscape.subject.loading.load import load
from landscape.subject.mc_dropout import with_members
from landscape.subject.subject import Subject

CLEAN = np.random.default_rng(0).integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
CLASSES = np.random.default_rng(1).integers(10, size=12)


def images(side: int = 32) -> Tensor:
    return torch.from_numpy(CLEAN).permute(0, 3, 1, 2)[..., :side, :side].contiguous()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-10's test images, and sequences of four frames of each."""
    write_test_images(tmp_path, CLEAN, CLASSES)
    (tmp_path / "CIFAR-10-P").mkdir()
    np.save(tmp_path / "CIFAR-10-P/tilt.npy", np.stack([np.roll(CLEAN, 9 * t, axis=2) for t in range(4)], axis=1))
    return tmp_path


def subject_on(root: Path, **options: Any) -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    return load(model, data="cifar10", data_root=root, **options)


def measured(subject: Subject, **options: Any) -> Any:
    return landscape.measure("perturbation", subject, out=None, quiet=True, **options)


def test_the_scores_of_files_are_those_of_their_definition(root: Path) -> None:
    subject = subject_on(root, batch_size=5)
    found = measured(subject)
    assert found["perturbation_name"].values.tolist() == ["tilt"]
    assert found.attrs["source"] == "sequences of CIFAR-10-P"
    frames = torch.from_numpy(np.load(root / "CIFAR-10-P/tilt.npy")).permute(1, 0, 4, 2, 3)
    with torch.no_grad():
        logits = [subject.model(subject.images.normalised(frame)).double() for frame in frames]
    p = torch.stack(logits).softmax(dim=2).numpy()
    same = (p[1:].argmax(2) == p[:-1].argmax(2)).mean(axis=0)  # per image
    entropy = -(p[1:] * np.log(p[:-1])).sum(axis=2).mean(axis=0)
    assert 0 < same.mean() < 1
    assert float(found["consistency"][0]) == pytest.approx(same.mean())
    assert float(found["consistency_se"][0]) == pytest.approx(same.std(ddof=1) / np.sqrt(12))
    assert float(found["cross_entropy"][0]) == pytest.approx(entropy.mean(), rel=1e-5)
    assert float(found["accuracy"][0]) == pytest.approx((p.argmax(2) == CLASSES).mean())
    np.testing.assert_allclose(found["accuracy_at"][0], (p.argmax(2) == CLASSES).mean(axis=1))
    assert np.isnan(found["consistency_at"][0, -1])  # the last frame has no next one


def test_a_replaced_file_of_the_same_size_is_another_source(root: Path) -> None:
    subject, path = subject_on(root, samples=9), root / "CIFAR-10-P/tilt.npy"
    used, before = rows_of(subject), digest(Perturbation(), subject)
    content = np.load(path)
    content[np.setdiff1d(np.arange(12), used)] ^= 1  # samples that are not measured
    np.save(path, content)
    assert digest(Perturbation(), subject) == before
    content[used[4], 2, 3, 4, 0] ^= 1
    np.save(path, content)
    assert digest(Perturbation(), subject) != before


@pytest.mark.slow
def test_a_network_that_always_answers_the_same_is_consistent(root: Path) -> None:
    subject = subject_on(root)
    for p in subject.model.parameters():
        nn.init.zeros_(p)
    found = measured(subject, source="generated")
    assert (found["consistency"] == 1).all()
    np.testing.assert_allclose(found["cross_entropy"], np.log(10))


def test_generated_sequences_are_what_their_names_say() -> None:
    clean = images()
    made = {name: perturbations.generated(clean, name, 0) for name in perturbations.FRAMES}
    for name, frames in perturbations.FRAMES.items():
        assert made[name].shape == (12, frames, 3, 32, 32)
    assert torch.equal(made["translate"][:, 7], clean)
    assert torch.equal(made["translate"][:, 10, ..., 3:], clean[..., :-3])  # three pixels to the right
    assert not made["translate"][:, 10, ..., :3].any()
    for name in ("rotate", "scale", "brightness"):
        assert torch.equal(made[name][:, 15], clean), name
    smaller = made["scale"][:, 0]
    assert not smaller[..., :4, :].any()  # 0.7 of the side
    assert smaller[..., 8:24, 8:24].any()
    noise = made["gaussian_noise"].float() - clean[:, None].float()
    assert not noise[:, 0].any()
    inside = (clean > 40) & (clean < 215)
    assert noise[:, 1][inside].std().item() == pytest.approx(0.02 * 255, rel=0.05)
    value = made["brightness"][:, 20].amax(dim=1).float() - clean.amax(dim=1).float()
    assert value[clean.amax(dim=1) < 200].mean().item() == pytest.approx(0.075 * 255, abs=0.5)


def test_noise_belongs_to_seed_and_row_alone() -> None:
    whole = perturbations.generated(images(8), "gaussian_noise", 0)
    assert torch.equal(perturbations.generated(images(8)[5:], "gaussian_noise", 0, first=5), whole[5:])
    assert not torch.equal(perturbations.generated(images(8), "gaussian_noise", 1), whole)


def test_a_rotation_turns_about_the_centre() -> None:
    picture = torch.zeros(1, 3, 31, 31, dtype=torch.uint8)
    picture[..., 15, 15], picture[..., 15, 29] = 255, 255
    turned = perturbations.generated(picture, "rotate", 0)[0, 0, 0].float()
    assert turned[15, 15] == 255
    rows, columns = np.meshgrid(np.arange(31), np.arange(31), indexing="ij")
    outer = turned.numpy() * (np.hypot(rows - 15, columns - 15) > 10)
    angle = np.degrees(np.arctan2((outer * (rows - 15)).sum(), (outer * (columns - 15)).sum()))
    assert abs(angle) == pytest.approx(15, abs=1)


@pytest.mark.slow
def test_members_keep_their_masks_along_a_sequence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)).eval()
    data = Images(images(), torch.from_numpy(CLASSES), "pictures", 10, 32, (0.5,) * 3, (0.25,) * 3)
    found = {}
    for size in (5, 12):
        subject = with_members(Subject(model, Batches(data, size)), 3)
        found[size] = measured(subject, perturbations="rotate", source="generated")
    assert float(found[5]["cross_entropy"][0]) == pytest.approx(float(found[12]["cross_entropy"][0]), rel=1e-6)


def test_bad_sequences_are_named(root: Path, tmp_path: Path) -> None:
    folder = root / "CIFAR-10-P"
    with pytest.raises(OptionError, match=r"has no tild; .*CIFAR-10-P has tilt, or all; did you mean tilt\?"):
        measured(subject_on(root), perturbations="tild")
    with pytest.raises(OptionError, match=r"generated are translate, .*did you mean rotate\?"):
        measured(subject_on(root), perturbations="rotat", source="generated")
    with pytest.raises(OptionError, match=r"holds no PERTURBATION\.npy files"):
        measured(subject_on(root), source=str(root / "cifar-10-batches-py"))
    for array, said in (
        (np.zeros((12, 1, 32, 32, 3), np.uint8), "sequences of 1 frame; consistency needs at least 2"),
        (np.zeros((11, 4, 32, 32, 3), np.uint8), "11 sequences and the test split 12 images"),
        (np.zeros((12, 32, 32, 3), np.uint8), r"expected uint8 \(sequences, frames, H, W, 3\)"),
    ):
        np.save(folder / "tilt.npy", array)
        with pytest.raises(ValueError, match=said):
            measured(subject_on(root))
    (folder / "tilt.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"tilt\.npy cannot be read"):
        measured(subject_on(root))
    data = (torch.rand(4, 3, 8, 8), torch.arange(4) % 3)
    with pytest.raises(ValueError, match=r"need images \(N, 3, H, W\) of uint8"):
        measured(landscape.load(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), data=data))


def test_the_answer_does_not_depend_on_the_source_where_it_cannot() -> None:
    assert Perturbation(perturbations=["rotate", "scale"]).perturbations == "rotate,scale"  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--source must be auto, generated or a folder"):
        Perturbation(source="")

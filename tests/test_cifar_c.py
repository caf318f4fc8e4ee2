"""CIFAR-10-C and CIFAR-100-C: rows of a severity, in the order of the clean test images."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cifar_files import write_test_images

from landscape.checkpoints.user_code import spec_sha256
from landscape.data import load
from landscape.options import OptionError
from landscape.subject.loading.identity import identity
from landscape.subject.loading.load import load as loaded

CLEAN = np.random.default_rng(0).integers(256, size=(20, 3072), dtype=np.uint8)
CLASSES = np.random.default_rng(1).integers(10, size=20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-10's test images, and two corruptions of them that add the severity, or twice that."""
    write_test_images(tmp_path, CLEAN.reshape(20, 3, 32, 32).transpose(0, 2, 3, 1), CLASSES)
    for place, classes in (("CIFAR-10-C", CLASSES), ("CIFAR-100-C", CLASSES + 90)):
        (tmp_path / place).mkdir()
        clean = CLEAN.reshape(20, 3, 32, 32).transpose(0, 2, 3, 1)
        for i, name in enumerate(("fog", "gaussian_noise"), start=1):
            np.save(tmp_path / place / f"{name}.npy", np.concatenate([clean + np.uint8(i * s) for s in range(1, 6)]))
        np.save(tmp_path / place / "labels.npy", np.tile(classes.astype(np.uint8), 5))
    return tmp_path


def test_a_severity_is_the_clean_test_split_corrupted_image_by_image(root: Path) -> None:
    clean = load("cifar10", root=root, samples=8)
    for severity in (1, 5):
        images = load(f"cifar10-c:gaussian_noise:{severity}", root=root, samples=8)
        assert torch.equal(images.inputs, clean.inputs + 2 * severity)
        assert torch.equal(images.targets, clean.targets)
        assert (images.mean, images.std, images.classes, images.size) == (clean.mean, clean.std, 10, 32)
    hundred = load("cifar100-c:fog:3", root=root, samples="50%", image_size=16)
    assert hundred.inputs.shape == (10, 3, 16, 16)
    assert (hundred.classes, int(hundred.targets.min()) >= 90) == (100, True)


@pytest.mark.slow
def test_a_subject_on_it_has_a_digest_of_what_it_sees(root: Path) -> None:
    def data(name: str) -> object:
        subject = loaded(model="resnet_demo", data=name, data_root=root, samples=4, device="cpu")
        return identity(subject, ())["data"]

    assert spec_sha256("cifar10-c:fog:3") is None
    assert data("cifar10-c:fog:3") == data("cifar10-c:fog:3")
    assert data("cifar10-c:fog:2") == data("cifar10-c:gaussian_noise:1")  # the same images
    assert data("cifar10-c:fog:3") != data("cifar10-c:fog:4")


@pytest.mark.parametrize(
    ("name", "split", "error", "message"),
    [
        ("cifar10-c", "test", OptionError, "is incomplete; give cifar10-c:CORRUPTION:SEVERITY"),
        ("cifar10-c:fog", "test", OptionError, "is incomplete"),
        ("cifar10-c:fog:6", "test", OptionError, "the severity must be 1 to 5, got 6"),
        ("cifar10-c:fog:3", "train", OptionError, "has test images only; give --split test"),
        ("cifar10-c:snow:3", "test", FileNotFoundError, r"no .*snow.npy \(there are fog, gaussian_noise\)"),
    ],
)
def test_what_is_not_there_is_explained(
    name: str, split: str, error: type[Exception], message: str, root: Path
) -> None:
    with pytest.raises(error, match=message):
        load(name, root=root, split=split)  # type: ignore[arg-type]


def test_files_that_do_not_belong_together_are_refused(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder is missing or empty.*unpack CIFAR-10-C\.tar under"):
        load("cifar10-c:fog:3", root=root / "elsewhere")
    np.save(root / "CIFAR-10-C/labels.npy", np.tile(CLASSES + 3, 5))
    with pytest.raises(ValueError, match="other classes than 0 to 9"):
        load("cifar10-c:fog:3", root=root)
    np.save(root / "CIFAR-10-C/labels.npy", CLASSES)
    with pytest.raises(ValueError, match=r"uint8 \(100, 32, 32, 3\) and labels.npy \(20,\)"):
        load("cifar10-c:fog:3", root=root)
    (root / "CIFAR-10-C/fog.npy").write_bytes((root / "CIFAR-10-C/fog.npy").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"fog\.npy cannot be read"):
        load("cifar10-c:fog:3", root=root)

"""CIFAR: the official layouts, what their pickles may hold, and downloads."""

import _codecs
import hashlib
import io
import os
import pickle
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cifar_files import write_test_images

from landscape.checkpoints.user_code import spec_sha256
from landscape.data import cifar, load
from landscape.data.sampling import balanced
from landscape.options import OptionError
from landscape.subject.loading.identity import identity
from landscape.subject.loading.load import load as loaded

pytestmark = pytest.mark.usefixtures("no_network")
REAL = Path(os.environ.get("LANDSCAPE_TEST_DATA") or Path(__file__).parents[1] / "../shared/data")


def cifar_rows(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(256, size=(count, 3072), dtype=np.uint8), random.integers(classes, size=count)


def write_pickled(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def test_python_and_binary_layouts_give_the_same_images(tmp_path: Path) -> None:
    for i in range(1, 6):
        pixels, labels = cifar_rows(7, 10, i)
        write_pickled(tmp_path / f"py/cifar-10-batches-py/data_batch_{i}", {"data": pixels, "labels": labels.tolist()})
        binary = tmp_path / f"bin/cifar-10-batches-bin/data_batch_{i}.bin"
        binary.parent.mkdir(parents=True, exist_ok=True)
        np.concatenate([labels[:, None].astype(np.uint8), pixels], 1).tofile(binary)
    pickled = load("cifar10", root=tmp_path / "py", split="train")
    assert pickled.sha256 == load("cifar10", root=tmp_path / "bin", split="train").sha256
    assert pickled.inputs.shape == (35, 3, 32, 32)
    # pixel (row 1, column 2) of green is byte 1024 + 34 of a row
    raw = cifar.load("cifar10", root=tmp_path / "py", split="train")
    assert raw.inputs[7, 1, 1, 2] == cifar_rows(7, 10, 2)[0][0, 1024 + 34]


def test_cifar100_takes_the_fine_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, fine = cifar_rows(9, 100, 0)
    write_pickled(
        tmp_path / "cifar-100-python/test",
        {"data": pixels, "fine_labels": list(fine), "coarse_labels": [0] * 9},  # numpy scalars are read too
    )
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    head = np.stack([np.zeros(9), fine], 1).astype(np.uint8)
    np.concatenate([head, pixels], 1).tofile(folder / "train.bin")
    monkeypatch.setenv("LANDSCAPE_DATA", str(tmp_path))
    assert load("cifar100").sha256 == load("cifar100", split="train").sha256
    assert load("cifar100").targets.tolist() == fine[balanced(fine)].tolist()


def test_old_spellings_of_numpy_are_read(tmp_path: Path) -> None:
    pixels, labels = cifar_rows(2, 10, 0)
    new = pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2)
    old = new.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    path = tmp_path / "cifar-10-batches-py/test_batch"
    path.parent.mkdir()
    path.write_bytes(old)
    assert torch.equal(cifar.load("cifar10", root=tmp_path, split="test").inputs.flatten(1), torch.tensor(pixels))


class Hostile:
    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        (os.system, ("touch pwned",), r"posix\.system"),
        (eval, ("1",), r"\beval\b"),
        (getattr, ("", "join"), r"getattr"),
        (np.fromfile, ("secret",), r"numpy\.fromfile"),
        (np.load, ("secret",), r"load"),
        (np.ndarray, ((1,), "O", b"\x10" * 8), r"not callable"),  # numpy itself would follow the bytes
        (np.dtype, ("O", False, True), r"plain numbers"),
    ],
)
def test_a_hostile_pickle_is_refused(
    function: Any, arguments: Any, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickled(tmp_path / "cifar-10-batches-py/test_batch", {"data": Hostile(function, *arguments), "labels": [0]})
    with pytest.raises(ValueError, match=rf"test_batch .*{names}"):
        load("cifar10", root=tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_codecs_encode_is_allowed_as_numpy_needs_it(tmp_path: Path) -> None:
    pixels, _ = cifar_rows(1, 10, 0)
    assert b"_codecs" in pickle.dumps(pixels, protocol=2)
    write_pickled(
        tmp_path / "cifar-10-batches-py/test_batch",
        {"data": pixels, "labels": [0], "batch_label": Hostile(_codecs.encode, "é", "latin1")},
    )
    assert len(load("cifar10", root=tmp_path)) == 1


TWO = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        {"data": TWO},  # no labels
        *({"data": TWO, "labels": labels} for labels in ([1], [1, 10], [1, -1], [1, [2]], [1, 1 << 80])),
        {"data": TWO[:, 1:], "labels": [1, 2]},
        {"data": np.zeros((2, 3072)), "labels": [1, 2]},
        {"data": [[0] * 3072], "labels": [1]},
        [1, 2],
    ],
)
def test_a_batch_of_another_form_is_refused(content: object, tmp_path: Path) -> None:
    write_pickled(tmp_path / "cifar-10-batches-py/test_batch", content)
    with pytest.raises(ValueError, match="test_batch"):
        load("cifar10", root=tmp_path)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    pixels, labels = cifar_rows(3, 10, 0)
    path = tmp_path / "cifar-10-batches-py/test_batch"
    write_pickled(path, {"data": pixels, "labels": labels.tolist()})
    whole = path.read_bytes()
    for kept in (0, 1, 30, 100, 3000, -1):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="test_batch"):
            load("cifar10", root=tmp_path)
    (tmp_path / "cifar-100-binary").mkdir()
    np.zeros(3074 * 2 - 1, np.uint8).tofile(tmp_path / "cifar-100-binary/test.bin")
    with pytest.raises(ValueError, match=r"test\.bin has 6147 bytes, expected rows of 3074"):
        load("cifar100", root=tmp_path)


def test_missing_files_are_named_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load("cifar100", root=tmp_path / "absent", split="train")
    for part in ("absent/cifar-100-python", "for train", "train.bin", "--data digits", "--data-root"):
        assert part in str(caught.value)
    assert not (tmp_path / "absent").exists()


def served(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes | str], md5: str | None = None) -> list[str]:
    """Serve a `.tar.gz` to every request (a str is the target of a link); returns the requested URLs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    urls: list[str] = []

    def respond(url: str, timeout: float) -> io.BytesIO:
        assert timeout <= 3
        urls.append(url)
        return io.BytesIO(buffer.getvalue())

    known = md5 or hashlib.md5(buffer.getvalue(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(urllib.request, "urlopen", respond)
    monkeypatch.setattr(cifar, "RELEASES", {"cifar100": replace(cifar.RELEASES["cifar100"], md5=known)})
    return urls


def cifar100_members() -> dict[str, bytes | str]:
    pixels, labels = cifar_rows(4, 100, 0)
    batch = pickle.dumps({"data": pixels, "fine_labels": labels.tolist()}, protocol=2)
    return {
        "cifar-100-python/train": batch, "../escaped": b"no", "cifar-100-python/../../escaped": b"no",
        "cifar-100-python/file.txt~": b"not wanted", "cifar-100-python/test": batch,
        "cifar-100-python/meta": b"names",
    }  # fmt: skip


def test_a_download_happens_once_and_keeps_the_wanted_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = served(monkeypatch, cifar100_members())
    root = tmp_path / "made/here"
    train, test = load("cifar100", root=root, split="train"), load("cifar100", root=root)
    assert urls == ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"]
    assert train.sha256 == test.sha256
    everything = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert everything == {f"made/here/cifar-100-python/{file}" for file in ("train", "test", "meta")}


@pytest.mark.parametrize("fault", ["checksum", "missing", "link"])
def test_a_wrong_download_leaves_nothing(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = cifar100_members()
    if fault == "missing":
        del members["cifar-100-python/test"]
    if fault == "link":
        members["cifar-100-python/test"] = "/etc/passwd"
    served(monkeypatch, members, md5="0" * 32 if fault == "checksum" else None)
    with pytest.raises(ValueError, match="MD5" if fault == "checksum" else "lacks the file cifar-100-python/test"):
        load("cifar100", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_real_cifar100_is_read() -> None:
    if not (REAL / "cifar-100-python").is_dir():
        pytest.skip("no real CIFAR-100 beside the repository")
    images = load("cifar100", root=REAL)
    assert images.targets[:100].unique().numel() == 100
    scaled = images.inputs.double() / 255
    assert scaled.mean((0, 2, 3)).tolist() == pytest.approx(images.mean, abs=0.03)
    assert scaled.std((0, 2, 3)).tolist() == pytest.approx(images.std, abs=0.03)


# --- CIFAR-10-C and CIFAR-100-C: rows of a severity, in the order of the clean test images ---


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
        ("cifar10-c:fog:3", "train", OptionError, "has a test split only; give that one"),
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

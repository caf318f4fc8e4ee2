"""Data sets: fixed order, the layouts that are read, and the files that are refused."""

from __future__ import annotations

import _codecs
import hashlib
import io
import os
import pickle
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from landscape.data import Batches, Images, cifar, digits, load
from landscape.data.augment import Augmentation
from landscape.data.images import balanced, keys, resized, shuffled
from landscape.data.source import named, spec_sha256
from landscape.probe import OptionError

REAL = Path(os.environ.get("LANDSCAPE_TEST_DATA") or Path(__file__).parents[1] / "../shared/data")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError("tests have no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("LANDSCAPE_DATA", raising=False)


def random_images(count: int, classes: int = 3, size: int = 6) -> Images:
    generator = torch.Generator().manual_seed(count)
    return Images(
        inputs=torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8),
        targets=torch.randint(classes, (count,), generator=generator),
        name="random",
        classes=classes,
        size=size,
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.25, 2.0),
    )


# --- order ---


def test_every_prefix_of_the_order_is_as_balanced_as_the_data_allow() -> None:
    available = np.array([50, 7, 20, 0, 1])
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(5), available))
    order = balanced(targets)
    assert sorted(order) == list(range(len(targets)))
    for n in range(len(targets) + 1):
        taken = np.bincount(targets[order[:n]], minlength=5)
        left = taken < available
        assert taken[left].min(initial=n) >= taken.max() - 1  # whoever has images left is at most one behind


def test_the_order_is_frozen() -> None:
    # published first outputs of SplitMix64 from seed 0; stored results depend on the order that follows
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert keys(np.arange(4)).tolist() == published
    assert shuffled(10).tolist() == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    assert balanced(np.arange(12) % 3).tolist() == [2, 4, 6, 8, 10, 0, 5, 1, 9, 11, 7, 3]


def test_rounds_do_not_keep_the_class_order() -> None:
    targets = np.arange(400) % 100
    rounds = targets[balanced(targets)].reshape(4, 100)
    assert all(len(set(row)) == 100 for row in rounds)
    assert len({tuple(row) for row in rounds}) == 4


# --- images and batches ---


def test_normalisation_is_the_closed_form() -> None:
    images = random_images(4)
    x = images.inputs.numpy().astype(np.float64)
    mean, std = np.array(images.mean)[:, None, None], np.array(images.std)[:, None, None]
    got = images.normalised(images.inputs)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), (x / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    plain = replace(images, mean=(), std=())
    assert plain.normalised(images.inputs) is images.inputs


@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_i_holds_rows_i_b_onward(drop_last: bool) -> None:
    images = random_images(10)
    batches = Batches(images, 4, drop_last=drop_last)
    assert len(batches) == len(list(batches)) == (2 if drop_last else 3)
    for i, (inputs, targets) in enumerate(batches):
        assert torch.equal(inputs, images.normalised(images.inputs[4 * i : 4 * i + 4]))
        assert torch.equal(targets, images.targets[4 * i : 4 * i + 4])
    assert torch.equal(batches[-1][0], batches[len(batches) - 1][0])
    assert len(batches[:2]) == 2
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_an_augmented_batch_is_the_same_at_every_access() -> None:
    images = random_images(16)
    images = replace(images, inputs=images.inputs[:8].repeat(2, 1, 1, 1), targets=images.targets[:8].repeat(2))
    batches = Batches(images, 8, augmentation=Augmentation(crop=2, flip=True, mixup=1.0), seed=3)
    again = Batches(images, 8, augmentation=Augmentation(crop=2, flip=True, mixup=1.0), seed=3)
    assert torch.equal(batches[1][0], batches[1][0])
    assert torch.equal(batches[1][1], again[1][1])
    assert torch.equal(batches[1][0], again[1][0])
    assert not torch.equal(batches[0][0], batches[1][0])  # equal images, another draw
    assert not torch.equal(replace(batches, seed=4)[1][0], batches[1][0])


def test_the_digest_sees_all_that_reaches_a_model() -> None:
    images = random_images(5)
    brighter = images.inputs.clone()
    brighter[4, 2, 5, 5] ^= 1
    variants = [
        images,
        replace(images, inputs=brighter),
        replace(images, inputs=images.inputs.transpose(2, 3).reshape(5, 3, 4, 9)),
        replace(images, inputs=images.inputs.to(torch.int16)),
        replace(images, targets=images.targets.flip(0)),
        replace(images, mean=(0.1, 0.2, 0.4)),
    ]
    assert len({variant.sha256() for variant in variants}) == len(variants)
    assert replace(images, name="other").sha256() == images.to("cpu").sha256() == images.sha256()


def test_resizing_keeps_constants_and_halves_by_known_weights() -> None:
    images = replace(random_images(3), inputs=torch.full((3, 3, 6, 6), 77, dtype=torch.uint8))
    larger = resized(images, 9)
    assert larger.inputs.shape == (3, 3, 9, 9)
    assert larger.size == 9
    assert torch.equal(larger.inputs.unique(), torch.tensor([77], dtype=torch.uint8))
    step = torch.tensor([0, 0, 80, 80], dtype=torch.uint8).expand(1, 3, 4, 4)
    halved = resized(replace(images, inputs=step, size=4), 2).inputs  # triangle weights 3, 3, 1 (of 7)
    assert halved[0, 0].tolist() == [[round(80 / 7), round(80 * 6 / 7)]] * 2
    assert resized(images, None) is images


# --- digits ---


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = digits.grey()
    reference = datasets.load_digits()
    np.testing.assert_array_equal(pixels, reference.images)
    np.testing.assert_array_equal(labels, reference.target)


def test_digits_splits_are_disjoint_and_complete() -> None:
    train, test = load("digits", split="train"), load("digits", split="test")
    assert (len(train), len(test)) == (1437, 360)
    labels = torch.cat([train.targets, test.targets])
    assert torch.equal(labels.bincount(), torch.from_numpy(np.bincount(digits.grey()[1])))
    order = shuffled(1797)
    assert torch.equal(test.targets.bincount(), torch.from_numpy(np.bincount(digits.grey()[1][order[-360:]])))


def test_digits_are_served_doubled_with_the_constants_of_their_train_split() -> None:
    train = load("digits", split="train")
    assert train.inputs.shape == (1437, 3, 16, 16)
    assert torch.equal(train.inputs[:, 0], train.inputs[:, 2])
    grey = torch.from_numpy(digits.grey()[0][shuffled(1797)[0]]) / 16 * 255
    corner = digits.load("train").inputs[0, 0]
    assert corner[0, 0] == grey[0, 0].round()
    inside = (9 * grey[3, 3] + 3 * grey[3, 4] + 3 * grey[4, 3] + grey[4, 4]) / 16  # bilinear at a quarter pixel
    assert corner[7, 7] == inside.round()
    scaled = train.inputs.double() / 255
    assert scaled.mean().item() == pytest.approx(train.mean[0], abs=5e-5)
    assert scaled.std().item() == pytest.approx(train.std[0], abs=5e-5)


def test_samples_are_a_prefix_and_more_than_all_are_all() -> None:
    whole, some = load("digits"), load("digits", samples=50)
    assert torch.equal(whole.inputs[:50], some.inputs)
    assert some.targets.bincount().tolist() == [5] * 10
    assert len(load("digits", samples=5000)) == 360
    assert load("digits", samples=20, image_size=32).inputs.shape == (20, 3, 32, 32)
    assert load("digits", samples=1, mean=(0.5,) * 3, std=(0.5,) * 3).mean == (0.5,) * 3


# --- CIFAR ---


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
    assert pickled.sha256() == load("cifar10", root=tmp_path / "bin", split="train").sha256()
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
    assert load("cifar100").sha256() == load("cifar100", split="train").sha256()
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
    function: Callable[..., Any],
    arguments: tuple[object, ...],
    names: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "cifar-10-batches-py/test_batch"
    write_pickled(path, {"data": Hostile(function, *arguments), "labels": [0]})
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


@pytest.mark.parametrize(
    "content",
    [
        {"data": np.zeros((2, 3072), np.uint8)},  # no labels
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, -1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, [2]]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 1 << 80]},
        {"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]},
        {"data": np.zeros((2, 3072)), "labels": [1, 2]},
        {"data": [[0] * 3072], "labels": [1]},
        [1, 2],
    ],
)
def test_a_batch_of_another_form_is_refused(content: object, tmp_path: Path) -> None:
    write_pickled(tmp_path / "cifar-10-batches-py/test_batch", content)
    with pytest.raises(ValueError, match="test_batch"):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 30, 100, 3000, -1])
def test_a_truncated_batch_is_refused(kept: int, tmp_path: Path) -> None:
    pixels, labels = cifar_rows(3, 10, 0)
    path = tmp_path / "cifar-10-batches-py/test_batch"
    write_pickled(path, {"data": pixels, "labels": labels.tolist()})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="test_batch"):
        load("cifar10", root=tmp_path)


def test_a_truncated_binary_file_is_refused(tmp_path: Path) -> None:
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
    """Answer every request with a `.tar.gz` (a str is the target of a link); the urls that were asked for."""
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

    def answer(url: str, timeout: float) -> io.BytesIO:
        assert timeout <= 3
        urls.append(url)
        return io.BytesIO(buffer.getvalue())

    known = md5 or hashlib.md5(buffer.getvalue(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(urllib.request, "urlopen", answer)
    monkeypatch.setattr(cifar, "RELEASES", {"cifar100": replace(cifar.RELEASES["cifar100"], md5=known)})
    return urls


def cifar100_members() -> dict[str, bytes | str]:
    pixels, labels = cifar_rows(4, 100, 0)
    batch = pickle.dumps({"data": pixels, "fine_labels": labels.tolist()}, protocol=2)
    return {
        "cifar-100-python/train": batch,
        "../escaped": b"no",
        "cifar-100-python/../../escaped": b"no",
        "cifar-100-python/file.txt~": b"not wanted",
        "cifar-100-python/test": batch,
        "cifar-100-python/meta": b"names",
    }


def test_a_download_happens_once_and_keeps_the_wanted_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = served(monkeypatch, cifar100_members())
    root = tmp_path / "new/root"
    train, test = load("cifar100", root=root, split="train"), load("cifar100", root=root)
    assert urls == ["https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"]
    assert train.sha256() == test.sha256()
    everything = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert everything == {f"new/root/cifar-100-python/{file}" for file in ("train", "test", "meta")}


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


# --- folders ---


def write_image(path: Path, *, size: tuple[int, int] = (8, 8), seed: int = 0) -> np.ndarray:
    """A random picture of (width, height), returned as (3, height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(*reversed(size), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels.transpose(2, 0, 1)


def test_a_folder_gives_the_pixels_of_its_images(tmp_path: Path) -> None:
    for i, name in enumerate(["b/2.png", "a/0.png", "a/1.PNG", "c/deep/3.bmp"]):
        write_image(tmp_path / name, seed=i)
    (tmp_path / ".cache").mkdir()
    (tmp_path / "a/notes.txt").write_text("no image")
    images = load(str(tmp_path))
    files, targets = ["a/0.png", "a/1.PNG", "b/2.png", "c/deep/3.bmp"], np.array([0, 0, 1, 2])
    order = balanced(targets)
    expected = [np.asarray(Image.open(tmp_path / files[row])).transpose(2, 0, 1) for row in order]
    np.testing.assert_array_equal(images.inputs.numpy(), np.stack(expected))
    assert images.targets.tolist() == targets[order].tolist()
    assert (images.classes, images.size, images.name) == (3, 8, str(tmp_path))
    assert images.mean == (0.485, 0.456, 0.406)


def test_a_jpeg_is_resized_on_its_shorter_side_and_cropped_at_the_centre(tmp_path: Path) -> None:
    write_image(tmp_path / "a/0.jpg", size=(90, 60))
    got = load(str(tmp_path), image_size=20).inputs[0].numpy()
    with Image.open(tmp_path / "a/0.jpg") as image:
        whole = np.asarray(image.resize((30, 20), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(got, whole[:, :, 5:25])
    assert load(str(tmp_path)).size == 224


def test_grey_and_transparent_images_become_three_channels(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4), 9).save(tmp_path / "a/0.png")
    Image.new("RGBA", (4, 4), (9, 9, 9, 0)).save(tmp_path / "a/1.png")
    assert load(str(tmp_path)).inputs.eq(9).all()


def test_splits_follow_their_folders_and_agree_on_the_classes(tmp_path: Path) -> None:
    for i, name in enumerate(["train/a/0.png", "train/b/0.png", "train/c/0.png", "val/c/0.png"]):
        write_image(tmp_path / name, seed=i)
    test = load(str(tmp_path), split="test")
    assert (len(test), test.classes, test.targets.tolist()) == (
        1,
        3,
        [2],
    )  # c is class 2 although val has no a, b
    assert len(load(str(tmp_path), split="train")) == 3
    assert load(str(tmp_path / "train"), split="test").targets.sort().values.tolist() == [0, 1, 2]
    only = tmp_path / "only"
    write_image(only / "train/a/0.png")
    with pytest.raises(FileNotFoundError, match="only has train but no test or val"):
        load(str(only), split="test")


def test_only_the_chosen_images_are_decoded(tmp_path: Path) -> None:
    for i in range(4):
        write_image(tmp_path / f"a/{i}.png", seed=i)
    last = balanced(np.zeros(4, np.int64))[-1]
    (tmp_path / f"a/{last}.png").write_bytes(b"broken")
    assert len(load(str(tmp_path), samples=3)) == 3
    for size in (None, 8):
        with pytest.raises(ValueError, match=rf"a/{last}\.png.* cannot be decoded"):
            load(str(tmp_path), image_size=size)


def test_a_cut_off_image_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a/0.jpg", size=(64, 64))
    whole = (tmp_path / "a/0.jpg").read_bytes()
    (tmp_path / "a/0.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a/0\.jpg cannot be decoded"):
        load(str(tmp_path))


def test_a_folder_without_images_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images in class folders"):
        load(str(tmp_path))
    write_image(tmp_path / "loose.png")
    with pytest.raises(FileNotFoundError, match="no images in class folders"):
        load(str(tmp_path))


# --- callables ---


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a file and returns its path, for `path:callable`."""

    def write(text: str) -> str:
        path = tmp_path / "my:data.py"  # the last colon counts
        path.write_text(text)
        return str(path)

    return write


PAIR = """
import torch
from neighbour import COUNT
def pair():
    return torch.arange(2.0 * COUNT, dtype=torch.float64).view(COUNT, 2), torch.arange(COUNT) % 3
"""


def test_a_pair_is_used_as_it_is(script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("COUNT = 7\n")
    spec = f"{script(PAIR)}:pair"
    images = load(spec, samples=5, mean=(0.5,), std=(0.5,))
    assert images.inputs.dtype == torch.float64
    assert torch.equal(images.inputs, torch.arange(10.0, dtype=torch.float64).view(5, 2))
    assert images.targets.tolist() == [0, 1, 2, 0, 1]
    assert (images.classes, images.size, images.mean, images.name) == (3, 0, (), spec)
    assert torch.equal(Batches(images, 2)[2][0], images.inputs[4:])


DATASET = """
from PIL import Image
import numpy as np, torch
from torch.utils.data import TensorDataset
READ = []
class Pictures:
    classes = ["x", "y", "z"]
    def __len__(self): return 6
    def __getitem__(self, i):
        READ.append(i)
        return Image.new("RGB", (4, 4), (i, i, i)), i % 2
class Listed(Pictures):
    targets = [0, 1, 0, 1, 0, 1]
def read(): return READ
def floats(): return TensorDataset(torch.arange(6.0).view(6, 1, 1, 1), torch.tensor([0, 0, 0, 0, 1, 1]))
def ragged(): return [(torch.zeros(1, 2, 2), 0), (torch.zeros(1, 3, 3), 1)]
def empty(): return []
def words(): return {"a": 1}
def failing(): raise RuntimeError("no disk\\nsecond line")
def mapped():
    values = np.ones((2, 3), np.float32)
    values.flags.writeable = False
    return values, np.array([0, 1])
def uneven(): return torch.zeros(3, 1), torch.zeros(2)
"""


def test_a_dataset_is_read_once_in_order_and_served_balanced(script: Callable[[str], str]) -> None:
    path = script(DATASET)
    images = load(f"{path}:Pictures")
    order = balanced(np.arange(6) % 2)
    assert named(f"{path}:read")() == list(range(6))
    assert images.inputs[:, 0, 0, 0].tolist() == order.tolist()
    assert images.targets.tolist() == (order % 2).tolist()
    assert (images.classes, images.size, images.inputs.dtype) == (3, 4, torch.uint8)
    assert images.mean == (0.485, 0.456, 0.406)
    assert load(f"{path}:Pictures", samples=3).sha256() == load(f"{path}:Listed", samples=3).sha256()
    assert named(f"{path}:read")()[-3:] == order[:3].tolist()  # a dataset that lists its targets: only the chosen
    floats = load(f"{path}:floats", samples=4)
    assert floats.targets.bincount().tolist() == [2, 2]
    assert floats.mean == ()
    assert load(f"{path}:mapped").inputs.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    ("callable_name", "message"),
    [
        ("ragged", r"item 1 has the shapes \(\(1, 3, 3\), \(\)\)"),
        ("empty", "empty list"),
        ("words", "returned a dict; expected a torch Dataset"),
        ("failing", "failed with RuntimeError: no disk$"),
        ("uneven", r"inputs \(3, 1\) and targets \(2,\)"),
        ("fail", "no callable 'fail'; it has failing"),
        ("READ", "no callable 'READ'"),
    ],
)
def test_a_callable_that_gives_no_data_is_explained(
    callable_name: str, message: str, script: Callable[[str], str]
) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"{script(DATASET)}:{callable_name}")


def test_specs_name_callables_of_files_and_modules(script: Callable[[str], str], tmp_path: Path) -> None:
    assert named("collections:OrderedDict") is __import__("collections").OrderedDict
    path = script("def f(): return 1\n")
    first, digest = named(f"{path}:f"), spec_sha256(f"{path}:f")
    assert digest == hashlib.sha256(b"def f(): return 1\n").hexdigest()
    assert named(f"{path}:f") is first
    script("def f(): return 2\n")
    assert named(f"{path}:f")() == 2  # an edited file is loaded anew
    assert spec_sha256(f"{path}:f") != digest
    assert spec_sha256("collections:OrderedDict") is None


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("nowhere/file.py:f", FileNotFoundError, "no file nowhere/file.py"),
        ("no_such_module:f", ValueError, "No module named 'no_such_module'"),
        ("collections:", ValueError, "names no callable"),
        (":f", ValueError, "names no callable"),
    ],
)
def test_a_spec_that_leads_nowhere_is_explained(spec: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        named(spec)


def test_a_file_that_does_not_import_is_explained(script: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match="failed with SyntaxError"):
        named(f"{script('def f(:')}:f")
    with pytest.raises(ValueError, match="failed with ModuleNotFoundError"):
        named(f"{script('import no_such_module')}:f")
    with pytest.raises(ValueError, match="failed with SystemExit"):
        named(f"{script('raise SystemExit(2)')}:f")


# --- names and options ---


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("cifr10", ValueError, "did you mean cifar10"),
        ("no/such/folder", FileNotFoundError, "no such folder"),
        (__file__, ValueError, "is a file"),
    ],
)
def test_an_unknown_name_is_explained(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load(name)


def test_values_out_of_range_are_option_errors() -> None:
    for options in ({"samples": 0}, {"image_size": 0}, {"split": "val"}):
        with pytest.raises(OptionError):
            load("digits", **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        Batches(random_images(2), 0)
    with pytest.raises(ValueError, match="3 channels"):
        load("digits", samples=1, mean=(0.5,), std=(0.5,))

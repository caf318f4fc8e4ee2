"""Arrays of numpy as data: their forms, the one rule of layout, and the files that are refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import landscape
from landscape.data import load, memory
from landscape.data.sampling import balanced

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(256, size=(24, 8, 6, 3), dtype=np.uint8)
LABELS = np.repeat(np.arange(3), 8)  # sorted, as such files often are
ORDER = balanced(LABELS)


def written(folder: Path, form: str, x: np.ndarray = IMAGES, y: np.ndarray = LABELS) -> str:
    """The two arrays in one of the forms; the name for `--data`."""
    if form == "npz":
        np.savez(folder / "set.npz", images=x, labels=y)
        return str(folder / "set.npz")
    if form == "packed":
        np.savez_compressed(folder / "set.npz", X=x, y=y)
        return str(folder / "set.npz")
    if form == "unnamed":
        np.savez(folder / "set.npz", x, y)
        return str(folder / "set.npz")
    names = ("X.npy", "Y.npy") if form == "two" else ("images.npy", "labels.npy")
    for name, array in zip(names, (x, y), strict=True):
        np.save(folder / name, array)
    return f"{folder / names[0]},{folder / names[1]}" if form == "two" else str(folder)


@pytest.mark.parametrize("form", ["npz", "packed", "unnamed", "two", "folder"])
def test_every_form_gives_the_same_images_class_balanced(form: str, tmp_path: Path) -> None:
    name = written(tmp_path, form)
    images = load(name, samples=7)
    np.testing.assert_array_equal(images.inputs.numpy(), IMAGES[ORDER[:7]].transpose(0, 3, 1, 2))
    assert images.targets.tolist() == LABELS[ORDER[:7]].tolist()
    assert (images.classes, images.size, images.name) == (3, 0, name)
    assert images.mean == (0.485, 0.456, 0.406)
    assert load(name, samples="50%").targets.bincount().tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((4, 8, 8, 3), (4, 3, 8, 8)),
        ((4, 3, 8, 8), (4, 3, 8, 8)),
        ((4, 8, 8, 1), (4, 1, 8, 8)),
        ((4, 8, 8), (4, 1, 8, 8)),
        ((4, 3, 8, 3), (4, 3, 8, 3)),  # both axes could be channels: axis 1 is
    ],
)
def test_the_channels_are_found_by_one_rule(shape: tuple[int, ...], wanted: tuple[int, ...], tmp_path: Path) -> None:
    x = RNG.integers(256, size=shape, dtype=np.uint8)
    images = load(written(tmp_path, "two", x, np.zeros(4, np.uint8)), split="train")
    assert images.inputs.shape == wanted
    flat = np.sort(images.inputs.numpy().reshape(4, -1), axis=1)
    np.testing.assert_array_equal(flat, np.sort(x[balanced(np.zeros(4))].reshape(4, -1), axis=1))
    assert images.mean == ((0.485, 0.456, 0.406) if wanted[1] == 3 else (0.5,))
    assert images.targets.dtype == torch.int64


def test_images_are_resized_and_cropped_like_those_of_folders(tmp_path: Path) -> None:
    x = np.repeat(np.arange(24, dtype=np.uint8), 8 * 6 * 3).reshape(IMAGES.shape)
    images = load(written(tmp_path, "npz", x), image_size=12)
    assert images.inputs.shape == (24, 3, 12, 12)
    assert images.inputs[:, 0, 3, 7].tolist() == ORDER.tolist()  # flat pictures stay what they are
    ramp = np.broadcast_to(np.arange(8, dtype=np.uint8)[:, None, None] * 10, (1, 8, 4, 3))
    cropped = load(written(tmp_path, "npz", ramp, np.zeros(1, np.int64)), image_size=4).inputs
    assert cropped[0, 0, :, 0].tolist() == [20, 30, 40, 50]  # the centre of the longer side


def test_other_numbers_count_as_normalised_and_other_targets_keep_their_order(tmp_path: Path) -> None:
    x = RNG.normal(size=(5, 4)).astype(">f4")  # of another byte order than the machine's
    regression = load(written(tmp_path, "npz", x, np.linspace(0, 1, 5)), samples=3, image_size=9)
    np.testing.assert_array_equal(regression.inputs.numpy(), x[:3])
    assert (regression.classes, regression.mean, regression.inputs.dtype) == (0, (), torch.float32)
    assert regression.targets.tolist() == [0, 0.25, 0.5]
    shares = load(written(tmp_path, "npz", x, np.eye(5)[:, :3]))
    assert (shares.classes, shares.targets.shape) == (3, (5, 3))
    column = load(written(tmp_path, "npz", x, np.arange(5)[:, None] % 2))  # as MedMNIST and Keras have them
    assert column.targets.tolist() == (balanced(np.arange(5) % 2) % 2).tolist()


@pytest.mark.parametrize("names", ["{}_{}", "{1}_{0}"])
def test_names_of_a_split_are_followed(names: str, tmp_path: Path) -> None:
    arrays = {}
    for part, value in (("train", 1), ("val", 2)):
        arrays |= {names.format("x", part): np.full((3, 2, 2), value, np.uint8), names.format("y", part): np.arange(3)}
    np.savez(tmp_path / "set.npz", **arrays)
    for split, value in (("train", 1), ("test", 2)):
        assert load(str(tmp_path / "set.npz"), split=split).inputs.unique().tolist() == [value]  # type: ignore[arg-type]
    for part, value in (("train", 1), ("test", 2)):
        (tmp_path / part).mkdir()
        written(tmp_path / part, "folder", np.full((3, 2, 2), value, np.uint8), np.arange(3))
    assert load(str(tmp_path), split="train").inputs.unique().tolist() == [1]
    assert load(str(tmp_path), split="test").inputs.unique().tolist() == [2]
    for name in (tmp_path / "set.npz", tmp_path):
        assert not load(str(name)).one_part
    for form in ("npz", "pair", "folder"):
        (tmp_path / form).mkdir()
        assert load(written(tmp_path / form, form, np.zeros((3, 2, 2), np.uint8), np.arange(3))).one_part


def test_a_file_on_disk_is_read_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = written(tmp_path, "two")
    monkeypatch.setattr(memory, "available", lambda: 4 * IMAGES[0].nbytes)
    assert len(load(name, samples=4)) == 4
    with pytest.raises(ValueError, match=r"24 samples of 144 bytes need 3.46 kB of memory and 576 bytes is free"):
        load(name)
    with pytest.raises(ValueError, match=r"images.npy: 3,456 samples of 1 bytes need"):  # an archive is read whole
        load(written(tmp_path, "npz"), samples=4)


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("ran"),))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (IMAGES, LABELS[:5], r"inputs \(24, 8, 6, 3\) and targets \(5,\); expected the same number of rows"),
        (IMAGES[..., :2], LABELS, r"uint8 inputs \(24, 8, 6, 2\); expected images \(N, H, W, C\)"),
        (IMAGES, np.array(["cat"] * 24), "the targets are <U3; expected numbers"),
        (IMAGES, np.array([Hostile()] * 24), "it holds Python objects, which are never unpickled"),
    ],
)
def test_arrays_that_are_no_data_are_refused(
    x: np.ndarray, y: np.ndarray, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in ("npz", "two"):
        with pytest.raises(ValueError, match=message):
            load(written(tmp_path, form, x, y))
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    two = written(tmp_path, "two")
    whole = (tmp_path / "X.npy").read_bytes()
    contents = {"cut": whole[:500], "short": whole[:5], "none": b"", "pickle": pickle.dumps(Hostile())}
    for content in contents.values():
        (tmp_path / "X.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"X\.npy cannot be read \("):
            load(two)
    archive = Path(written(tmp_path, "packed"))
    whole = archive.read_bytes()
    for content in (*contents.values(), whole[:-40], whole[:200] + b"\0" * 40 + whole[240:]):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.npz cannot be read \("):
            load(str(archive))
    np.savez(archive, pictures=IMAGES, classes=LABELS)
    with pytest.raises(ValueError, match=r"holds pictures, classes; expected .* images and labels, x and y"):
        load(str(archive))
    with pytest.raises(FileNotFoundError, match=r"there is no file gone\.npy"):
        load("gone.npy,Y.npy")
    with pytest.raises(FileNotFoundError, match=r"there is no file gone\.npz"):
        load("gone.npz")
    assert not (tmp_path / "ran").exists()


def test_a_class_of_which_there_is_no_sample_is_no_other_data_set(tmp_path: Path) -> None:
    name = written(tmp_path, "npz", np.zeros((6, 8, 8, 3), np.uint8), np.arange(6) % 3)
    (tmp_path / "mine.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential\n"
        "def model(classes=4): return Sequential(Flatten(), Linear(192, classes))\n"
    )
    spec = f"{tmp_path / 'mine.py'}:model"
    assert len(landscape.load(None, model=spec, data=name, device="cpu")) == 6
    with pytest.raises(ValueError, match=r"the model has 2 classes and .* has 3"):
        landscape.load(None, model=spec, model_arg={"classes": 2}, data=name, device="cpu")


@pytest.mark.slow
def test_an_archive_that_unpacks_to_far_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "set.npz", images=np.zeros((30_000, 64, 64), np.uint8), labels=np.zeros(30_000, int))
    with pytest.raises(ValueError, match=r"set\.npz.* declares images.npy of 122,880,000 bytes.*refused"):
        load(str(tmp_path / "set.npz"), samples=24)


def test_truth_values_are_classes_and_long_numbers_become_double(tmp_path: Path) -> None:
    x, truth = np.arange(6 * 4, dtype=np.longdouble).reshape(6, 4), np.arange(6) % 2 == 1
    np.savez(tmp_path / "a.npz", x=x, y=truth)
    np.savez(tmp_path / "b.npz", x=x.astype(np.float64), y=truth.astype(np.int64))
    one, other = (load(str(tmp_path / name)) for name in ("a.npz", "b.npz"))
    assert one.inputs.dtype == torch.float64
    assert one.targets.dtype == torch.int64
    assert one.sha256 == other.sha256
    np.savez(tmp_path / "c.npz", x=x.astype(np.float32), y=np.arange(6, dtype=np.longdouble))
    assert load(str(tmp_path / "c.npz")).targets.dtype == torch.float64


def test_truth_values_of_a_data_set_are_the_classes_0_and_1() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(12, 4), torch.nn.Linear(4, 2)
    truth = x[:, 0] > 0
    data = {
        "pair": (x, truth), "integers": (x, truth.long()),
        "items": [(a, bool(b)) for a, b in zip(x, truth, strict=True)],
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, truth), batch_size=12),
    }  # fmt: skip
    found = {name: landscape.load(model, data=made) for name, made in data.items()}
    losses = {name: sum(subject.loss(i).item() for i in range(len(subject.batches))) for name, subject in found.items()}
    assert losses == pytest.approx(dict.fromkeys(data, losses["integers"]))

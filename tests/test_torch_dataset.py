"""Datasets, loaders and streams made in Python: what a sample may be, and the order that is served."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from landscape.data import memory, torch_dataset
from landscape.data.dataset import Images
from landscape.data.sample_reading import Request, read_item
from landscape.data.sampling import Samples, balanced, shuffled
from landscape.data.structure import BatchLayout
from landscape.data.torch_dataset import data_of
from landscape.subject.loading.identity import protocol
from landscape.subject.loading.load import load
from landscape.subject.loading.preprocessing import DataObject, load_images, sharing_images
from landscape.subject.spec import Spec

INPUTS = torch.arange(24.0).view(12, 1, 1, 2)
CLASSES = torch.arange(12) % 3


def served(made: Any, samples: Samples = None, image_size: int | None = None) -> Images:
    images = data_of(made, Request("mine.py:data", samples, image_size))
    assert isinstance(images, Images)
    return images


def rows_of(images: Images) -> list[int]:
    """Which of INPUTS were served, in order."""
    return (images.inputs.flatten(1)[:, 0] / 2).int().tolist()


# --- checkpoints of one command ---


def test_subjects_share_samples_that_do_not_depend_on_how_their_models_are_called(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("""
import torch
def pair(): return torch.zeros(6, 3), torch.zeros(6).long()
def named(): return [{"x": torch.ones(3) * i, "z": torch.ones(3) * -i, "label": i % 2} for i in range(6)]
""")

    def loaded(data: str, called_with: str) -> Images:
        spec = Spec(data=f"{tmp_path / 'mine.py'}:{data}")
        found = load_images(spec, None, DataObject(layout=lambda: BatchLayout((called_with,))))
        assert isinstance(found, Images)
        return found

    with sharing_images():
        assert loaded("pair", "x") is loaded("pair", "z")
        assert [loaded("named", name).inputs.sum().item() for name in "xzx"] == [45.0, -45.0, 45.0]
    assert loaded("pair", "x") is not loaded("pair", "x")


# --- what a sample may be ---


class Listed(Dataset[Any]):
    """Samples of any form, which counts how often each was read."""

    def __init__(self, form: str) -> None:
        self.form, self.read = form, [0] * 12

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        self.read[i] += 1
        value, target = INPUTS[i], int(CLASSES[i])
        forms = {
            "longer": (value, target, {"index": i}),
            "list": [value, target],
            "transformers": {"pixel_values": value, "labels": target, "index": i},
            "datasets": {"image": value, "label": target},
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["longer", "list", "transformers", "datasets"])
def test_samples_of_every_form_are_drawn_at_random_and_only_those_are_read(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Listed(form)
    with caplog.at_level("INFO"):
        images = served(dataset, 5)
    drawn = shuffled(12)[:5]
    assert rows_of(images) == drawn[balanced(CLASSES.numpy()[drawn])].tolist()
    assert images.targets.tolist() == CLASSES[rows_of(images)].tolist()
    again = drawn[:4].tolist()  # are they the same?
    assert dataset.read == [1 * (i in drawn) + 1 * (i in again) for i in range(12)]
    assert "does not list its targets, so that 5 of its 12 items are drawn at random" in caplog.text
    assert (images.classes, images.mean) == (3, ())
    caplog.clear()
    assert rows_of(served(Listed(form))) == balanced(CLASSES.numpy()).tolist()  # all samples
    assert "at random" not in caplog.text


class Regression(Listed):
    def __getitem__(self, i: int) -> Any:
        self.read[i] += 1
        return INPUTS[i], float(i)


def test_numbers_that_are_no_classes_are_the_first_ones() -> None:
    dataset = Regression("list")
    assert rows_of(served(dataset, 5)) == [0, 1, 2, 3, 4]
    assert sum(dataset.read) <= 5 + 4 + 1


def listing(**lists: Any) -> Listed:
    dataset = Listed("list")
    for name, listed in lists.items():
        setattr(dataset, name, listed)
    return dataset


OFFERS: dict[str, Any] = {
    "targets": lambda: listing(targets=CLASSES),
    "labels": lambda: listing(labels=CLASSES.numpy()),
    "samples": lambda: listing(samples=[("a.png", c) for c in CLASSES.tolist()]),
    "names in labels": lambda: listing(labels=["a"] * 12, samples=[("a.png", c) for c in CLASSES.tolist()]),
    "two parts": lambda: ConcatDataset([Subset(listing(labels=CLASSES), range(7)),
                                        Subset(listing(targets=CLASSES), range(7, 12))]),
    "tensors": lambda: TensorDataset(INPUTS, CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("offer", OFFERS)
def test_targets_that_a_dataset_offers_balance_the_classes_without_reading_all(
    offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(torch_dataset, "read_item", lambda *a: reads.append(a[2]) or read_item(*a))  # type: ignore[func-returns-value]
    images = served(OFFERS[offer](), 5)
    assert rows_of(images) == balanced(CLASSES.numpy())[:5].tolist()
    assert len(reads) == 5 + 4


NO_LISTS: list[Any] = [np.array(3), torch.tensor(3), np.zeros((12, 2), int), [[1], [2, 3]]]
NO_TARGETS: list[Any] = [{"labels": [-1] * 12}, {"labels": [0, 1]}, {"samples": [1] * 12}]
NO_TARGETS += [{"targets": found, "labels": found} for found in NO_LISTS]


@pytest.mark.parametrize("lists", NO_TARGETS)
def test_lists_that_are_no_class_numbers_are_not_used(lists: dict[str, Any]) -> None:
    dataset = listing(**lists)
    assert len(served(dataset, 5)) == 5
    assert sum(dataset.read) == 5 + 4


def test_classes_are_counted_as_served_and_those_of_a_loader_are_its_datasets() -> None:
    assert served(listing(targets=(10 * CLASSES).tolist())).classes == 3
    assert served(DataLoader(Listed("list")), 2).classes == 2
    assert served(DataLoader(listing(targets=CLASSES.tolist())), 2).classes == 3


class Masked(nn.Module):
    """A classifier that also takes an attention mask, as timm's transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        assert attn_mask is None
        return self.head(x.flatten(1))


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.full((3, 2, 2), float(i)), int(CLASSES[i]), i


@pytest.mark.parametrize("made", [Indexed(), DataLoader(Indexed(), batch_size=4), [Indexed()[i] for i in range(12)]])
def test_the_index_beside_a_picture_and_its_class_is_no_target(made: Any) -> None:
    subject = load(Masked(), data=made)
    assert subject.images.classes == 3
    rows = subject.images.inputs[:, 0, 0, 0].long()
    assert subject.images.targets.tolist() == CLASSES[rows].tolist()


def test_fields_and_tuples_of_unknown_meaning_are_refused() -> None:
    masked = [(torch.zeros(4, 12), torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))]
    with pytest.raises(ValueError, match=r"has 3 entries and the model takes several inputs .* give a dict"):
        load(Masked(), data=masked)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"fails on a batch with the fields picture, class_id .*pixel_values, image"):
        load(model, data=[{"picture": INPUTS[0], "class_id": 1}])
    for items in ([INPUTS[0]], [(INPUTS[0],)], DataLoader(TensorDataset(INPUTS))):
        with pytest.raises(ValueError, match=r"in memory has no targets, which the loss needs; give pairs"):
            load(model, data=items)
    with pytest.raises(ValueError, match="a batch is a list without tensors"):
        served(["word"])


class Column(list[int]):
    """A lazy column, as new releases of `datasets` return one."""


class HuggingFace:
    """What the project needs of a `datasets.Dataset`: columns, features, encoded pictures."""

    column_names = ["image", "label"]  # noqa: RUF012
    features = {"image": object(), "label": type("ClassLabel", (), {"names": ["a", "b", "c", "d"]})()}  # noqa: RUF012

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return Column(CLASSES.tolist())
        self.read.append(key)
        picture, stream = Image.new("L", (90, 70), key), io.BytesIO()
        picture.save(stream, "PNG")
        return {"image": picture if key % 2 else {"bytes": stream.getvalue(), "path": None}, "label": int(CLASSES[key])}


def test_a_dataset_of_hugging_face_lists_its_labels_and_may_encode_its_pictures() -> None:
    dataset = HuggingFace()
    images = served(dataset, 4, image_size=10)
    order = balanced(CLASSES.numpy())[:4]
    assert dataset.read == 2 * order.tolist()  # the first four again: are they the same?
    assert images.inputs[:, 0, 0, 0].tolist() == order.tolist()
    assert (images.inputs.shape, images.classes) == ((4, 3, 10, 10), 4)
    assert served(HuggingFace(), 1).size == 224


def test_of_a_subset_only_the_chosen_are_read() -> None:
    whole = listing(targets=CLASSES.tolist())
    part = Subset(whole, list(range(11, 1, -1)))
    assert rows_of(served(part, 4)) == [11 - row for row in balanced(CLASSES.numpy()[11:1:-1])[:4]]
    assert sorted(whole.read) == [0] * 8 + [2] * 4  # read again: are they the same?


# --- loaders and streams ---


def test_a_loader_is_served_in_its_order_and_read_no_further_than_needed() -> None:
    dataset = Listed("longer")
    images = served(DataLoader(dataset, batch_size=4), 6)
    assert rows_of(images) == list(range(6))
    assert images.targets.tolist() == CLASSES[:6].tolist()
    assert dataset.read == [1] * 8 + [0] * 4
    assert rows_of(served(DataLoader(TensorDataset(INPUTS, CLASSES), batch_size=5))) == list(range(12))
    assert len(served(DataLoader(Listed("datasets"), batch_size=5, drop_last=True))) == 10
    assert len(served(DataLoader(Listed("transformers"), batch_size=5), "50%")) == 6


def test_a_shuffling_loader_is_read_once_in_one_order(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    following = torch.randn(1)
    torch.manual_seed(3)
    with caplog.at_level("INFO", logger="landscape"):
        first, again = (served(DataLoader(Listed("list"), batch_size=4, shuffle=True)) for _ in range(2))
    assert torch.equal(torch.randn(1), following)  # nobody else's random numbers have moved
    assert first.sha256 == again.sha256
    assert rows_of(first) != list(range(12))
    assert sorted(rows_of(first)) == list(range(12))
    assert "the loader shuffles; it is read once, with the shuffle of seed 0" in caplog.text


class Jittered(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return INPUTS[i] + torch.rand(1), int(CLASSES[i])


@pytest.mark.parametrize("made", [Jittered(), DataLoader(Jittered(), batch_size=12, shuffle=True)])
def test_random_transforms_stand_in_the_protocol(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    assert "random transforms drawn once" in protocol(load(model, data=made))
    assert "transforms its items at random; each was drawn once" in caplog.text
    assert "no augmentation" in protocol(load(model, data=DataLoader(Listed("list"), batch_size=4, shuffle=True)))


def test_samples_in_the_order_of_their_classes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ordered = TensorDataset(INPUTS, CLASSES.sort().values)
    served(DataLoader(ordered, batch_size=128))  # all of them: nothing is left out
    assert caplog.text == ""
    served(DataLoader(ordered, batch_size=128), 8)
    assert "the first 8 samples are sorted by class, 0 to 1; shuffle the loader" in caplog.text


@pytest.mark.parametrize(("size", "said"), [(64, True), (128, False)])
def test_a_loader_whose_mini_batches_are_divided_anew_is_told_so(
    size: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataLoader(TensorDataset(torch.randn(130, 3), torch.arange(130) % 3), batch_size=size)
    subject = load(nn.Linear(3, 3).eval(), data=data)
    assert subject.samples(0) == 128
    words = f"mini-batches of data hold {size} samples and are divided anew, 128 in each; --batch-size {size} (batch_"
    assert (words in caplog.text) is said


def test_mini_batches_without_a_common_size_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    data = [(torch.randn(n, 3), torch.arange(n) % 3) for n in (8, 5, 11)]
    kept = load(nn.Linear(3, 3).eval(), data=[{"x": x, "y": y} for x, y in data], batch_size=8, loss=loss)
    assert "24 samples, mini-batches of 8, 5, 11, " in protocol(kept)
    assert not caplog.text
    load(nn.Linear(3, 3).eval(), data=data, batch_size=8)
    assert "mini-batches of data hold 8, 5, 11 samples and are divided anew, 8 in each\n" in caplog.text


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((torch.full((1, 1, 2), 2.0 * i), i % 3) for i in itertools.count())


class Counted(Endless):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return itertools.islice(super().__iter__(), len(self))


@pytest.mark.parametrize(("samples", "count"), [(4, 4), ("50%", 3), (None, 6)])
def test_a_stream_with_a_length_is_read_in_its_order(samples: Samples, count: int) -> None:
    assert rows_of(served(Counted(), samples)) == list(range(count))


class Wrapped:
    """A loader that wraps another, as prefetchers do."""

    dataset = TensorDataset(INPUTS, CLASSES)

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.dataset, batch_size=5))


@pytest.mark.parametrize("made", [Endless, lambda: DataLoader(Endless(), batch_size=4), lambda: iter(Endless())])
def test_a_stream_gives_its_first_samples(made: Any) -> None:
    images = served(made(), 6)
    assert rows_of(images) == list(range(6))
    assert images.targets.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="without a length; give a number with --samples"):
        served(made(), "10%")


def test_streams_give_all_they_have_and_an_endless_one_ends_at_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rows_of(served(Wrapped())) == list(range(12))
    assert rows_of(served((x, int(y)) for x, y in zip(INPUTS, CLASSES, strict=True))) == list(range(12))
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    with pytest.raises(ValueError, match=r"mine.py:data: .* is free; give fewer samples"):
        served(Endless())


def test_pictures_of_a_stream_have_the_size_of_the_first() -> None:
    images = served((Image.new("RGB", (side, side), (side, 0, 0)), 0) for side in (20, 30))
    assert images.inputs.shape == (2, 3, 20, 20)
    assert images.inputs[:, 0, 0, 0].tolist() == [20, 30]


def failing() -> Iterator[Any]:
    yield INPUTS[0], 0
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (failing(), "mine.py:data failed with OSError: disk gone"),
        (iter([]), "gave 0 inputs and 0 targets; expected equally many, at least one"),
        (iter([(INPUTS[0], 0), (INPUTS[0, 0], 0)]), r"item 1: input: samples are|item 1: samples are \(1, 2\)"),
        (7, "returned a int; expected a torch Dataset or DataLoader"),
        ({"x": "word"}, "returned a dict; expected a torch Dataset or DataLoader"),
        ({"x": INPUTS, "y": CLASSES[:3]}, "returned tensors with 12, 3 rows; expected the same number in all"),
    ],
)
def test_what_gives_no_samples_is_explained(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        served(made)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_and_pictures_of_16_bits_become_tensors_of_bytes() -> None:
    images = served([(np.full((1, 2, 2), i, np.uint8), np.int64(i)) for i in range(3)])
    assert (images.inputs.dtype, images.mean) == (torch.uint8, (0.5,))
    grey = np.random.default_rng(0).integers(256, size=(8, 8), dtype=np.uint8)
    images = served([(Image.fromarray(grey.astype(np.uint16) * 257), 0), (Image.fromarray(grey), 1)])
    assert (images.inputs == torch.from_numpy(grey)).all()
    with pytest.raises(ValueError, match=r"item 0 .* its mode is F, numbers without a known range"):
        served([(Image.fromarray(grey.astype(np.float32)), 0)])


def pairs_of_pictures(side: int, mode: str = "L") -> list[Any]:
    masks = [Image.new(mode, (side, side), (i,) * 3 if mode == "RGB" else i) for i in range(3)]  # type: ignore[arg-type]
    return [(Image.new("RGB", (side, side)), mask) for mask in masks]


def test_masks_that_are_pictures_hold_class_numbers() -> None:
    images = served(pairs_of_pictures(8))
    assert images.targets.shape == (3, 8, 8)
    assert images.targets[:, 0, 0].tolist() == [0, 1, 2]
    assert images.targets.dtype == torch.int64


@pytest.mark.parametrize(
    ("side", "mode", "message"), [(80, "L", "80 x 80, and its input is resized to 224"), (8, "RGB", "of mode RGB")]
)
def test_masks_without_class_numbers_are_refused(side: int, mode: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served(pairs_of_pictures(side, mode))

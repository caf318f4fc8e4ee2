"""Samples in memory, of every form: what the model and the loss get of them, and what happens when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from shapes import SAMPLES, drawn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from landscape.api import measure
from landscape.predictions.evaluation import metrics_of
from landscape.subject.loading.load import load
from landscape.subject.subject import Subject


@pytest.mark.parametrize("form", ["pair", "arrays", "dataset", "loader", "batches", "generator"])
def test_one_classifier_has_the_same_loss_from_data_of_every_form(form: str) -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    batches = [(inputs[i : i + 5], targets[i : i + 5]) for i in range(0, SAMPLES, 5)]
    data: Any = {
        "pair": (inputs, targets),
        "arrays": (inputs.numpy(), targets.numpy()),
        "dataset": TensorDataset(inputs, targets),
        "loader": DataLoader(TensorDataset(inputs, targets), batch_size=5),
        "batches": batches,
        "generator": iter(batches),
    }[form]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    found = measure("surface", load(model, data=data, batch_size=4), out=None, resolution=3, quiet=True)
    wanted = F.cross_entropy(model(inputs), targets).item()
    assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
    assert found.attrs["samples"] == SAMPLES
    assert found.attrs["batch_size"] == 4


def test_the_number_of_classes_may_be_given() -> None:
    data = (drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2)
    with pytest.raises(ValueError, match="the model has 3 classes and the data in memory has 4"):
        load(nn.Linear(3, 3), data=data, classes=4)
    assert load(nn.Linear(3, 4), data=data, classes=4).images.classes == 4  # type: ignore[union-attr]


def test_samples_without_targets_are_reconstructed() -> None:
    inputs = drawn(SAMPLES, 3)
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    wanted = (model(inputs) - inputs).square().mean().item()
    for data in (TensorDataset(inputs), DataLoader(TensorDataset(inputs), batch_size=4), {"x": inputs}):
        assert metrics_of(load(model, data=data, loss="mse"))["loss"] == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="in memory has no targets, which the loss needs"):
        load(model, data=TensorDataset(inputs))


@pytest.mark.slow
def test_samples_changed_in_place_are_measured_anew(tmp_path: Path) -> None:
    inputs, targets = drawn(SAMPLES, 3), torch.arange(SAMPLES) % 2
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    array = inputs.numpy()  # shares memory, and is changed without a trace
    forms: list[Any] = [(inputs, targets), {"input": inputs, "y": targets}, (array, targets.numpy())]
    for subject in (*(load(model, data=data) for data in forms), Subject(model, [(inputs, targets)])):
        for _ in range(2):
            found = measure("surface", subject, out=tmp_path / "r.h5", resolution=3, quiet=True)
            wanted = F.cross_entropy(model(inputs), targets).item()
            assert found.loss.sel(x=0, y=0).item() == pytest.approx(wanted, rel=1e-6)
            array *= 2


def test_a_batch_may_refer_to_itself() -> None:
    class Cyclic:
        def __init__(self, features: Tensor, target: Tensor) -> None:
            self.features, self.target, self.batch = features, target, self

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, batch: Cyclic) -> Tensor:
            return cast(Tensor, self.head(batch.batch.features))

    batch = Cyclic(drawn(SAMPLES, 3).double(), torch.arange(SAMPLES) % 2)
    subject = load(Reader(), data=[batch])
    wanted = F.cross_entropy(subject.model.head(batch.features.float()), batch.target).item()
    assert subject.objective(0).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_linear_probe_fits_on_the_samples_in_memory_that_it_does_not_score() -> None:
    targets = torch.arange(120) % 3
    data = drawn(120, 3) / 4 + F.one_hot(targets, 3), targets
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    found = measure("probe-linear", load(model, data=TensorDataset(*data), samples=40), out=None, quiet=True)
    assert found.attrs["fitted_on"].startswith("80 samples")
    assert found.accuracy.values[0] > 0.8
    with pytest.raises(ValueError, match=r"the data in memory must have at least .*score fewer with --samples 60"):
        measure("probe-linear", load(model, data=data), out=None, quiet=True)


class Tagger(nn.Module):
    """Its outputs are as long as the longest sequence of the mini-batch, not as the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        return cast(Tensor, self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]))


def tagged() -> list[tuple[Tensor, Tensor, Tensor]]:
    batches = []
    for lengths in ([2, 3, 6], [4, 1, 2]):
        words = pad_sequence([torch.arange(n) + 1 for n in lengths], batch_first=True)
        tags = pad_sequence([torch.arange(n) % 3 for n in lengths], batch_first=True, padding_value=-100)
        batches.append((words, torch.tensor(lengths), tags))
    return batches


def test_a_padded_mini_batch_is_not_cut_and_padding_does_not_count_as_an_error() -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets)

    torch.manual_seed(0)
    model = Tagger()
    metrics = metrics_of(load(model, data=tagged(), loss=mean))
    losses, shares = [], []
    for words, lengths, tags in tagged():
        outputs = model(words, lengths)
        losses.append(mean(outputs, tags).item())
        hits = outputs.argmax(dim=2) == tags
        shares += [hits[i, : lengths[i]].double().mean().item() for i in range(3)]
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(np.mean(shares), rel=1e-6)


def test_a_number_of_samples_takes_whole_mini_batches() -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), targets)

    subject = load(Tagger(), data=tagged(), loss=mean, samples=2)  # two of three sequences would be shorter
    assert len(subject.batches) == 1
    assert torch.equal(subject.batches[0][0][0], tagged()[0][0])


@pytest.mark.parametrize("flat_losses", [True, False])
def test_losses_of_padding_are_refused(flat_losses: bool) -> None:
    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return losses.flatten() if flat_losses else losses

    with pytest.raises(ValueError, match=r"is 0 for 12 of 30 tokens or pixels"):
        load(Tagger(), data=tagged(), loss=each)


def test_losses_of_pixels_without_a_label_are_refused() -> None:
    masks = torch.zeros(4, 5, 5).long()
    masks[:, 0] = 255
    each = nn.CrossEntropyLoss(ignore_index=255, reduction="none")
    with pytest.raises(ValueError, match=r"is 0 for 20 of 100 tokens or pixels, .* / \(targets != 255\)"):
        load(nn.Conv2d(3, 2, 1), data=(drawn(4, 3, 5, 5), masks), loss=lambda outputs, targets: each(outputs, targets))


def test_what_does_not_fit_is_said_in_words() -> None:
    with pytest.raises(ValueError, match=r"return inputs.float.* or give --mean and --std of pictures"):
        load(nn.Conv2d(3, 2, 1), data=(torch.zeros(4, 3, 5, 5, dtype=torch.uint8), torch.zeros(4).long()))
    fields = load(nn.Bilinear(3, 3, 2), data={"input1": drawn(9, 3), "input2": drawn(9, 3), "y": torch.arange(9) % 2})
    for probe in ("noise", "attack"):
        with pytest.raises(ValueError, match="got the fields input1, input2; "):
            measure(probe, fields, out=None, quiet=True)
    mean = load(nn.Linear(3, 2), data=(drawn(8, 3), torch.arange(8) % 2), loss=lambda outputs, targets: outputs.mean())
    with pytest.raises(ValueError, match=r"needs 128 mini-batches, .*; lower --batch-size$"):
        measure("noise-scale", mean, out=None, quiet=True)


def test_losses_of_the_real_tokens_have_no_accuracy() -> None:
    def real(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[targets >= 0], targets[targets >= 0], reduction="none")

    metrics = metrics_of(load(Tagger(), data=tagged(), loss=real))
    assert metrics["samples"] == 18
    assert "accuracy" not in metrics


def test_a_mean_over_a_mini_batch_without_a_label_is_refused() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    targets = torch.arange(12) % 3
    targets[4:8] = -100
    pair = (drawn(12, 5), targets)
    batches = DataLoader([{"x": x, "labels": y} for x, y in zip(*pair, strict=True)], 4)  # type: ignore[arg-type]
    for own, data in ((loss, batches), (nn.CrossEntropyLoss(), pair)):
        with pytest.raises(ValueError, match=r"mini-batch 1 of the data in memory has none \(all -100\)"):
            load(nn.Linear(5, 3), data=data, loss=own, batch_size=4)
    load(nn.Linear(5, 3), data=pair, loss=nn.CrossEntropyLoss(), batch_size=12)


@pytest.mark.parametrize("ignored", [255, 0, -100])
@pytest.mark.parametrize("pixels", [False, True])
def test_targets_that_a_loss_ignores_are_looked_for_in_all_samples(ignored: int, pixels: bool) -> None:
    """Also those that are no first sample, or the number of a class; accuracy and mean would count them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Conv2d(3, 4, 1) if pixels else nn.Linear(5, 4)
    inputs = torch.randn((8, 3, 2, 2) if pixels else (8, 5))
    targets = torch.randint(1, 4, (8, 2, 2) if pixels else (8,))
    targets[5:, ...] = torch.where(torch.rand(targets[5:].shape) < 0.8, ignored, targets[5:])

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, ignore_index=ignored, reduction="none")

    for loss in (each, nn.CrossEntropyLoss(ignore_index=ignored, reduction="none")):
        with pytest.raises(ValueError, match=rf"is 0 for \d+ of .* target {ignored} stands for no label"):
            load(model, data=(inputs, targets), loss=loss)
    mean = nn.CrossEntropyLoss(ignore_index=ignored)  # of those with a label alone
    subject = load(model, data=(inputs, targets), loss=mean, batch_size=8)
    assert subject.traits.mean_only
    assert subject.traits.no_accuracy == (ignored == 0 or not pixels)
    assert subject.loss(0).item() == pytest.approx(mean(model(inputs), targets).item(), rel=1e-5)


def test_masks_with_ignored_pixels_are_targets() -> None:
    def dense(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1)

    torch.manual_seed(0)
    model, pictures = nn.Conv2d(3, 2, 1), drawn(4, 3, 5, 5)
    masks = torch.arange(25).view(1, 5, 5).expand(4, 5, 5) % 2
    masks = torch.where(drawn(4, 5, 5) > 1, -100, masks)
    found = load(model, data=(pictures, masks), loss=dense).objective(0).item()
    assert found == pytest.approx(dense(model(pictures), masks).mean().item(), rel=1e-6)


class OptionalMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.head(src + tgt if mask is None else (src + tgt) * mask))


def test_a_tuple_that_may_or_may_not_hold_an_optional_input_is_refused() -> None:
    x, mask, y = drawn(SAMPLES, 3), torch.ones(SAMPLES, 3), torch.arange(SAMPLES) % 2
    with pytest.raises(ValueError, match="not clear which are inputs"):
        load(OptionalMask(), data=(x, x, mask, y))
    assert metrics_of(load(OptionalMask(), data=((x, x, mask), y)))["samples"] == SAMPLES


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [(nn.Conv2d(3, 2, 1), (drawn(4, 5, 5, 3), torch.zeros(4).long()), r"lie as \(N, H, W, C\): return each as")],
)
def test_pictures_that_do_not_fit_the_default_are_explained(model: nn.Module, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(model, data=data)


@pytest.mark.parametrize("files", [False, True])
def test_normalisation_is_named_only_where_there_is_one(files: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors are left as they are, which needs no words; pictures become tensors and are normalised."""
    caplog.set_level("INFO", logger="landscape")
    tensors = torch.rand(SAMPLES, 3, 4, 4)
    picture = Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8))
    data: Any = [(picture if files else tensors[i], i % 2) for i in range(SAMPLES)]
    load(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)), data=Listed(data), batch_size=SAMPLES)
    assert ("normalised by" in caplog.text) == files


class Listed(Dataset[Any]):
    """A list as a Dataset."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]

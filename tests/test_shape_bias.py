"""Shape bias: decisions on pictures with known shape and texture, mappings to categories, bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import run_probe
from PIL import Image
from torch import Tensor, nn

import landscape
from landscape.data import cue_conflict
from landscape.data.dataset import Batches, Images
from landscape.options import OptionError
from landscape.probes.shape_bias import ShapeBias
from landscape.subject.loading.identity import digest
from landscape.subject.mc_dropout import with_members
from landscape.subject.subject import Subject


class Red(nn.Module):
    """Decides class 0 where red is above 1/2, else class 1, and never 2 nor 3."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def forward(self, images: Tensor) -> Tensor:
        red = self.scale * (images[:, 0].mean(dim=(1, 2)) - 0.5)
        return torch.stack([red, -red, -self.scale.expand_as(red), -self.scale.expand_as(red)], dim=1)


def subject(model: nn.Module | None = None, *, name: str = "pictures", batch_size: int = 3, side: int = 8) -> Subject:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (10, 3, side, side), generator=random, dtype=torch.uint8)
    images = Images(inputs, torch.arange(10) % 4, name, 4, side, (0.0,) * 3, (1.0,) * 3)
    return Subject(Red() if model is None else model, Batches(images, batch_size))


def folder(path: Path, names: dict[str, int]) -> Path:
    """Pictures of the given names and amounts of red, 0 to 255."""
    for name, red in names.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), (red, 0, 0), np.uint8)).save(path / name)
    return path


def mapping(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def measured(of: Subject, **options: Any) -> Any:
    return landscape.measure("shape-bias", of, out=None, quiet=True, **options)


def test_decisions_are_counted_by_shape_and_by_texture(tmp_path: Path) -> None:
    cues = folder(
        tmp_path / "cues",
        {
            "cat/cat1-dog1.png": 255, "cat/cat1-dog2.png": 255, "cat/cat2-dog1.png": 0,  # shape, shape, texture
            "dog/dog1-cat1.png": 255, "dog/dog1-bird3.png": 255,  # texture, neither
            "cat/cat3-cat5.png": 255, "cat/cat1-truck1.png": 255,  # no conflict; no category of the model
        },
    )  # fmt: skip
    chosen = mapping(tmp_path / "m.json", {"cat": [0], "dog": [1], "bird": [2, 3]})
    found = measured(subject(), cues=str(cues), mapping=chosen)
    assert found["category_name"].values.tolist() == ["cat", "dog", "bird"]
    assert float(found["shape_bias"]) == pytest.approx(2 / 4)
    assert float(found["shape_bias_se"]) == pytest.approx(np.std([1, 1, 0, 0], ddof=1) / 2)
    np.testing.assert_allclose(found["category_bias"], [2 / 3, 0, np.nan])
    assert float(found["shape_accuracy"]) == pytest.approx(2 / 5)
    assert float(found["texture_accuracy"]) == pytest.approx(2 / 5)
    assert found.attrs["left_out"] == 1
    assert "5 pictures of cues" in found.attrs["protocol"]


def test_a_replaced_picture_of_the_same_size_is_another_one(tmp_path: Path) -> None:
    chosen = mapping(tmp_path / "m.json", {"cat": [0], "dog": [1]})
    probe, of = ShapeBias(cues=str(tmp_path), mapping=chosen), subject()
    path, digests, decided = tmp_path / "cat1-dog1.bmp", [], []
    for red in (0, 255):
        folder(tmp_path, {path.name: red})
        digests.append((path.stat().st_size, digest(probe, of)))
        decided.append(run_probe(probe, of)["by_shape"].sum())
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]
    assert decided == [0, 1]


def test_a_category_has_the_mean_probability_of_its_classes() -> None:
    average = cue_conflict.matrix_of({"a": [0], "b": [1, 2, 3]}, 5)
    p = np.array([[0.3, 0.25, 0.2, 0.15, 0.1]])
    np.testing.assert_allclose(p @ average, [[0.3, 0.2]])  # a sum would decide for b


def test_generated_pictures_have_the_phase_of_one_and_the_amplitude_of_another() -> None:
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).mul(60).add(100).round().to(torch.uint8)
    targets = torch.tensor([0, 0, 1, 2])
    made, shape, texture = cue_conflict.recombined(images, targets)
    assert torch.equal(shape, targets)
    assert texture.tolist() == [1, 1, 2, 0]
    same, _, _ = cue_conflict.recombined(images[[1, 1, 2]], torch.tensor([0, 1, 2]))
    assert torch.equal(same[0], images[1])  # its own amplitude gives the image back
    spectrum, wanted = torch.fft.fft2(made.double()), torch.fft.fft2(images[[2, 2, 3, 0]].double())
    assert ((spectrum.abs() - wanted.abs()).abs() < 0.1 * wanted.abs() + 10).double().mean() > 0.95  # but for rounding


def test_the_samples_are_the_pictures_without_a_folder_and_members_are_averaged_whatever_the_batch_size() -> None:
    found, again = (measured(subject(batch_size=size)) for size in (3, 10))
    assert "generated" in found.attrs["protocol"]
    assert found["category_name"].values.tolist() == ["0", "1", "2", "3"]
    assert float(found["shape_accuracy"]) == float(again["shape_accuracy"])
    assert int(found["pictures"].sum()) == 10
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.Linear(16, 4)).eval()
    found, again = (measured(with_members(subject(model, batch_size=size), 3)) for size in (4, 10))
    assert float(found["shape_accuracy"]) == float(again["shape_accuracy"])


def test_classes_have_the_names_of_their_folders(tmp_path: Path) -> None:
    for name in ("zebra", "ant"):
        (tmp_path / "train" / name).mkdir(parents=True)
    assert cue_conflict.class_names(str(tmp_path), 2) == {"ant": [0], "zebra": [1]}
    assert list(cue_conflict.class_names("cifar10", 10))[3] == "cat"
    assert list(cue_conflict.class_names("digits", 3)) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"cat": [0]}, "at least two categories"),
        ({"cat": 0, "dog": [1]}, "lists of class numbers"),
        ({"cat": [0], "dog": [4]}, "names the classes 0 to 4; the model has 0 to 3"),
        ({"cat": [0], "dog": [0]}, "names class 0 twice"),
        ([1, 2], "at least two categories"),
    ],
)
def test_bad_mappings_are_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        measured(subject(), mapping=mapping(tmp_path / "m.json", content))


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"holds no pictures; give a folder with files such as cat1-elephant2\.png"):
        measured(subject(), cues=str(tmp_path))
    same = folder(tmp_path / "same", {"cat1-cat2.png": 0})
    with pytest.raises(ValueError, match="no picture whose shape and texture differ"):
        measured(subject(), cues=str(same))
    with pytest.raises(OptionError, match="among the categories 0, 1, 2, 3; the pictures are of cat; give --mapping"):
        measured(subject(), cues=str(folder(tmp_path / "cues", {"cat1-dog2.png": 0})))
    with pytest.raises(ValueError, match=r"photo\.png does not say its shape and texture"):
        measured(subject(), cues=str(folder(tmp_path / "other", {"photo.png": 0})))
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(OptionError, match=r"m\.json is no JSON"):
        measured(subject(), mapping=str(tmp_path / "m.json"))

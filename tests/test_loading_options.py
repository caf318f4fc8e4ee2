"""Loading options: every one is obeyed or refused by every form of data, and protocols say what holds."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import landscape
from landscape.options import OptionError
from landscape.subject.loading.identity import identity, protocol
from landscape.subject.spec import Spec

OF_EVERY_FORM = """
import torch
from torch import nn
def net(): return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
def pixels(): return nn.Conv2d(3, 3, 1)
def vectors(): return nn.Linear(4, 3)
def language(): return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
class Sum(nn.Module):
    def __init__(self): super().__init__(); self.head = nn.Linear(4, 3)
    def forward(self, a, b): return self.head(a + b)
def floats(): return torch.arange(48.0).view(12, 4), torch.arange(12) % 3
class Bytes(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((3, 16, 16), i, dtype=torch.uint8), i % 3
def batches(): return [{"a": torch.ones(4, 4), "b": torch.ones(4, 4), "label": torch.arange(4) % 3}] * 3
"""
DATA_OF_EVERY_FORM = {  # form -> (model, data)
    "tensors": ("vectors", "mine.py:floats"), "bytes": ("net", "mine.py:Bytes"), "folder": ("net", "classes"),
    "masks": ("pixels", "masks"), "tokens": ("language", "tokens.npy"), "batches": ("Sum", "mine.py:batches"),
    "npz": ("net", "a.npz"),
}  # fmt: skip
THREE = (0.1, 0.2, 0.3)
EVERY_OPTION: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in {
        "data_root": Path("."), "samples": 5, "batch_size": 3, "augment": True, "recipe": "cifar-cnn", "loss": "mse",
        "weight_decay": 0.1, "mc_dropout": 2, "ignore_index": 1, "image_size": 8, "crop": "0.5", "block_size": 4,
        "smooth": True, "smooth_at": "0", "smooth_block": "tau=2", "seed": 3, "weights": "ema", "adapter": "separate",
        "classes": 9,
    }.items()},
    "mean": {"mean": THREE, "std": THREE},
    "interpolation": {"interpolation": "bicubic", "image_size": 8},
    "model_arg": {"model_arg": {"width": 3}},
}  # fmt: skip
# Permissions and statements about the network; a split of data in one part, and the size of mini-batches that their
# source formed: what holds stands in the protocol.
ELSEWHERE = {"trust_pickle", "allow_missing", "outputs", "device", "split", "data", "model", "checkpoint", "std"}


def test_every_loading_option_is_tried_below() -> None:
    fields = {name for name, field in Spec.__dataclass_fields__.items() if "Annotated" in str(field.type)}
    assert fields - ELSEWHERE == {*EVERY_OPTION} - {"classes"}


@pytest.fixture(scope="module")
def every_form(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("forms"), np.random.default_rng(0)
    (folder / "mine.py").write_text(OF_EVERY_FORM)
    for i in range(6):
        picture = Image.fromarray(random.integers(256, size=(16, 16, 3), dtype=np.uint8))
        for place in (f"classes/{'abc'[i % 3]}", "masks/images"):
            (folder / place).mkdir(parents=True, exist_ok=True)
            picture.save(folder / place / f"{i}.png")
        (folder / "masks/masks").mkdir(exist_ok=True)
        Image.fromarray(random.integers(3, size=(16, 16), dtype=np.uint8)).save(folder / f"masks/masks/{i}.png")
    np.save(folder / "tokens.npy", random.integers(40, size=400).astype(np.uint16))
    np.savez(folder / "a.npz", x=random.integers(256, size=(12, 16, 16, 3), dtype=np.uint8), y=np.arange(12) % 3)
    return folder


def described(form: str, **options: Any) -> str:
    """What identifies the subject of a form of data, and its first sample."""
    model, data = DATA_OF_EVERY_FORM[form]
    options = ({"block_size": 8} if form == "tokens" else {}) | options
    subject = landscape.load(model=f"mine.py:{model}", data=data, **options)
    source = subject.batches if subject.images is None else subject.images
    uses = ("batch_size", "weight_decay", "seed")
    return str([identity(subject, uses), protocol(subject), source.classes, subject.example()[0]])  # type: ignore[union-attr]


as_it_is = cache(described)


@pytest.mark.parametrize("form", ["tensors", "folder", "masks", "npz"])
def test_protocols_name_the_data_and_not_the_folder_that_they_lie_in(form: str, every_form: Path) -> None:
    """Captions print them, and a reviewer must not learn who measured."""
    model, data = DATA_OF_EVERY_FORM[form]
    subject = landscape.load(model=f"{every_form}/mine.py:{model}", data=f"{every_form}/{data}")
    assert protocol(subject).startswith(f"{data} ")


@pytest.mark.parametrize("option", EVERY_OPTION)
@pytest.mark.parametrize("form", DATA_OF_EVERY_FORM)
def test_every_loading_option_is_obeyed_or_refused(
    form: str, option: str, every_form: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(every_form)
    if (form, option) == ("batches", "batch_size"):
        assert "batch size 4" in described(form, batch_size=3)
        return
    try:
        found = described(form, **EVERY_OPTION[option])
    except ValueError:
        return
    assert found != as_it_is(form)


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("tensors", {"image_size": 8, "mean": THREE, "std": THREE}, "--image-size, --mean, --std: no effect on mine"),
        ("masks", {"crop": "0.5", "interpolation": "bicubic"}, "--interpolation, --crop: no effect on masks, as its"),
        ("batches", {"ignore_index": 1}, "--ignore-index 1 has no effect"),
        ("folder", {"data_root": Path("."), "block_size": 3}, "--block-size, --data-root: no effect on classes"),
        ("npz", {"weights": "ema"}, "--weights: no effect on a.npz, as there is no checkpoint; leave it out"),
    ],
)
def test_options_without_effect_are_refused_by_name(
    form: str, options: dict[str, Any], message: str, every_form: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(every_form)
    with pytest.raises(OptionError, match=message):
        described(form, **options)

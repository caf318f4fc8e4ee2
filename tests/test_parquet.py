"""Images in parquet files as Hugging Face lays them out."""

import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from landscape.data import load
from landscape.data.sampling import balanced

PIXELS = np.random.default_rng(0).integers(256, size=(30, 8, 8, 3), dtype=np.uint8)
LABELS = np.repeat(np.arange(3), 10)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows of the images to a file, ten at a time in a row group of four."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def written(
        name: str, rows: range, *, labels: Any = None, image: str = "image", label: str = "label", raw: bool = False,
        names: Any = None,
    ) -> Path:  # fmt: skip
        pictures = [png(PIXELS[row]) if raw else {"bytes": png(PIXELS[row]), "path": f"{row}.png"} for row in rows]
        table = arrow.table({image: pictures, label: list(LABELS[rows]) if labels is None else labels})
        if names:
            about = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}, image: {"_type": "Image"}}}}
            table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, tmp_path / name, row_group_size=4)
        return tmp_path / name

    return written


def test_shards_give_what_one_array_would(write: Write, tmp_path: Path) -> None:
    for i in range(3):
        write(f"data/train-{i:05}-of-00003.parquet", range(10 * i, 10 * i + 10))
    images = load(str(tmp_path), split="train", samples=11)
    order = balanced(LABELS)[:11]
    np.testing.assert_array_equal(images.inputs.numpy(), PIXELS[order].transpose(0, 3, 1, 2))
    assert images.targets.tolist() == LABELS[order].tolist()
    assert (images.classes, images.size, images.name) == (3, 8, str(tmp_path))
    assert images.mean == (0.485, 0.456, 0.406)
    assert load(str(tmp_path), split="train", image_size=5).inputs.shape == (30, 3, 5, 5)


@pytest.mark.parametrize(("image", "label", "raw"), [("img", "fine_label", False), ("image", "label", True)])
def test_columns_are_found_by_name_and_kind(image: str, label: str, raw: bool, write: Write) -> None:
    file = write("cats.parquet", range(10, 30), image=image, label=label, raw=raw)
    for split in ("train", "test"):  # one file serves both
        images = load(str(file), split=split)  # type: ignore[arg-type]
        assert torch.equal(images.targets, torch.from_numpy(LABELS[10:][balanced(LABELS[10:])]))


def test_splits_follow_the_names_of_the_shards(write: Write, tmp_path: Path) -> None:
    write("train-00000-of-00001.parquet", range(0, 30))
    write("validation-00000-of-00001.parquet", range(10))
    assert len(load(str(tmp_path), split="train")) == 30
    validation = load(str(tmp_path), split="test")
    assert (len(validation), validation.classes) == (10, 3)  # all splits have a say in the classes
    assert not validation.one_part
    assert load(str(tmp_path / "train-00000-of-00001.parquet")).one_part
    write("test-00000-of-00001.parquet", range(5), labels=[-1] * 5)  # as ImageNet's: no labels
    assert len(load(str(tmp_path), split="test")) == 10
    (tmp_path / "validation-00000-of-00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"the test split has no labels \(class -1\)"):
        load(str(tmp_path), split="test")
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(FileNotFoundError, match="has shards for train but none for the test split"):
        load(str(tmp_path), split="test")


def test_words_are_classes_in_their_order_and_the_file_may_name_more(write: Write) -> None:
    words = write("words.parquet", range(4), labels=["dog", "cat", "dog", "ant"])
    images = load(str(words))
    assert (images.classes, images.targets.sort().values.tolist()) == (3, [0, 1, 2, 2])
    described = write("named.parquet", range(10), names=["a", "b", "c", "d", "e"])
    assert load(str(described)).classes == 5


def test_only_the_chosen_pictures_are_decoded_and_a_damaged_one_is_named(write: Write, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    order = balanced(np.zeros(10, np.int64))
    pictures = [{"bytes": png(PIXELS[row]), "path": None} for row in range(10)]
    pictures[order[-1]]["bytes"] = b"broken"
    file = tmp_path / "some.parquet"
    parquet.write_table(arrow.table({"image": pictures, "label": [0] * 10}), file, row_group_size=3)
    assert len(load(str(file), samples=9)) == 9
    with pytest.raises(ValueError, match=rf"some\.parquet row {order[-1]} cannot be decoded"):
        load(str(file))
    pictures[order[-1]] = {"bytes": None, "path": "beside.png"}
    parquet.write_table(arrow.table({"image": pictures, "label": [0] * 10}), file)
    (tmp_path / "beside.png").write_bytes(png(PIXELS[7]))
    np.testing.assert_array_equal(load(str(file)).inputs[-1].numpy(), PIXELS[7].transpose(2, 0, 1))


def test_a_file_that_is_no_set_of_images_is_explained(write: Write, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"text": ["a"], "score": [0.5]}), file)
    with pytest.raises(ValueError, match=r"the columns text \(string\), score \(double\); expected one of pictures"):
        load(str(file))
    parquet.write_table(arrow.table({"image": [png(PIXELS[0])] * 2, "label": [1, None]}), file)
    with pytest.raises(ValueError, match="the column 'label' has missing values"):
        load(str(file))
    for content in (b"", b"PAR1", write("u.parquet", range(4)).read_bytes()[:300]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.parquet is not a readable parquet file"):
            load(str(file))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone\.parquet"):
        load(str(tmp_path / "gone.parquet"))


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=r"pip install pyarrow, or install landscape with its extra \[parquet\]"):
        load(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("place", ["../outside.png", "/outside.png", "none.png"])
def test_pictures_beside_a_shard_are_in_its_folder(place: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    (folder := tmp_path / "inside").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "outside.png")
    place = place.replace("/outside", f"{tmp_path}/outside") if place.startswith("/") else place
    table = pyarrow.table({"image": [{"bytes": None, "path": place}] * 2, "label": [0, 1]})
    importlib.import_module("pyarrow.parquet").write_table(table, folder / "a.parquet")
    with pytest.raises(ValueError, match=r"outside the folder of|there is no file"):
        load(str(folder / "a.parquet"), split="train")

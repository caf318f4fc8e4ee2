"""Folders of class folders: which images are read, and how they become tensors."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from landscape.data import decoding, load, memory
from landscape.data.cue_conflict import listed
from landscape.data.image_folder import is_picture, pictures
from landscape.data.sampling import balanced


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


GREY = np.random.default_rng(3).integers(256, size=(8, 8), dtype=np.uint8)


def in_mode(mode: str) -> Image.Image:
    """The same grey picture in a mode of Pillow."""
    if mode in ("I;16", "I", "F"):
        kind = {"I": np.int32, "F": np.float32}.get(mode, np.uint16)
        return Image.fromarray((GREY.astype(np.int64) * 257).astype(kind))
    picture = Image.fromarray(GREY).convert(mode.removesuffix("+"))
    if mode == "P+":
        picture.info["transparency"] = bytes(range(256))
    return picture


READERS = {"classes": "{}/a/1.png", "images with masks": "{}/images/1.png"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", ["I;16", "L", "P", "P+", "LA", "RGBA", "CMYK"])
def test_pictures_of_every_mode_are_scaled_by_its_range(reader: str, mode: str, tmp_path: Path) -> None:
    path = Path(READERS[reader].format(tmp_path))
    path.parent.mkdir(parents=True)
    if reader != "classes":
        (tmp_path / "masks").mkdir()
        Image.fromarray(GREY // 128).save(tmp_path / "masks/1.png")
    in_mode(mode).save(path, "TIFF" if mode == "CMYK" else "PNG")
    assert (load(str(tmp_path)).inputs == torch.from_numpy(GREY)).all()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("mode", ["I", "F"])
def test_pictures_whose_range_is_not_known_are_refused_by_name(reader: str, mode: str, tmp_path: Path) -> None:
    path = Path(READERS[reader].format(tmp_path))
    path.parent.mkdir(parents=True)
    (tmp_path / "images").mkdir(exist_ok=True)
    if reader != "classes":
        np.save(tmp_path / "labels.npy", np.zeros(1, np.int64))
    in_mode(mode).save(path, "TIFF")
    said = rf"\(its mode is {mode}, numbers without a known range; .*\); repair or remove it"
    with pytest.raises(ValueError, match=rf"^{path} cannot be decoded {said}"):
        load(str(tmp_path))


def test_splits_follow_their_folders_and_agree_on_the_classes(tmp_path: Path) -> None:
    for i, name in enumerate(["train/a/0.png", "train/b/0.png", "train/c/0.png", "val/c/0.png"]):
        write_image(tmp_path / name, seed=i)
    test = load(str(tmp_path), split="test")
    assert (len(test), test.classes, test.targets.tolist()) == (1, 3, [2])  # c is class 2 although val has no a, b
    assert len(load(str(tmp_path), split="train")) == 3
    assert not test.one_part
    assert load(str(tmp_path / "train"), split="test").one_part
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


def test_what_lies_beside_pictures_is_none(tmp_path: Path) -> None:
    for place in ("a", "images", "masks"):
        write_image(tmp_path / place / "1.png")
        (tmp_path / place / "._1.png").write_bytes(b"\0\5\x16\7")
    Image.fromarray(GREY // 128).save(tmp_path / "masks/1.png")
    write_image(tmp_path / "cues/cat1-dog1.png")
    (tmp_path / "cues/._cat1-dog1.png").write_bytes(b"\0\5\x16\7")
    assert len(load(str(tmp_path))) == len(pictures(str(tmp_path / "a"))) == len(listed(tmp_path / "cues")) == 1


def test_a_class_without_pictures_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_image(tmp_path / "cat/1.png")
    assert load(str(tmp_path)).classes == 1
    assert "no images in" not in caplog.text
    (tmp_path / "__MACOSX/cat").mkdir(parents=True)
    assert load(str(tmp_path)).classes == 2
    assert "no images in ['__MACOSX'], which count as classes" in caplog.text


@pytest.mark.parametrize(("names", "noted"), [(range(12), True), (range(3), False), (["00", "01", "10"], False)])
def test_numbers_as_classes_are_noted_where_their_order_is_not_that_of_the_names(
    names: Iterable[object], noted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        write_image(tmp_path / f"{name}/1.png")
    load(str(tmp_path))
    assert ("in the order of their names (0, 1, 10), as torchvision does, not of their numbers; write them with "
            "leading zeros (00)" in caplog.text) is noted  # fmt: skip


def test_what_cannot_be_decoded_is_said_once(tmp_path: Path) -> None:
    write_image(tmp_path / "images/1.png", size=(64, 64))
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(3, size=(64, 64), dtype=np.uint8)).save(tmp_path / "masks/1.png")
    for damaged in ("masks/1.png", "images/1.png"):
        content = (tmp_path / damaged).read_bytes()
        for kept in (len(content) // 2, 5):
            (tmp_path / damaged).write_bytes(content[:kept])
            message = rf"^{tmp_path / damaged} cannot be decoded \([^()]*\); repair or remove it$"
            with pytest.raises(ValueError, match=message):
                load(str(tmp_path))
        Image.fromarray(np.zeros((64, 64), np.uint8)).save(tmp_path / damaged)
    picture = tmp_path / "a/1.png"
    picture.parent.mkdir()
    picture.write_bytes(b"none")
    with pytest.raises(ValueError, match=rf"^{picture} cannot be decoded \([^()]*\); repair or remove it$"):
        decoding.decoded([decoding.Picture(0, str(picture), str(picture))], name="a", count=1, of=1, size=8)


def test_a_cut_off_image_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "a/0.jpg", size=(64, 64))
    whole = (tmp_path / "a/0.jpg").read_bytes()
    (tmp_path / "a/0.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a/0\.jpg cannot be decoded"):
        load(str(tmp_path))


def test_a_folder_without_images_says_what_is_expected(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="no images in class folders"):
            load(str(tmp_path))
        write_image(tmp_path / "loose.png")


def test_files_are_listed_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = ["a/2.png", "a/10.png", "a/deep.png", "a/deep/z.png", "a/deep a/y.jpg", "a/deep-b.png", "a/.dot.png"]
    for i, name in enumerate([*names, "a/deep/er/x.webp", "b/0.PNG", "b/notes.txt"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_image(tmp_path / name, seed=i) if not name.endswith("txt") else (tmp_path / name).touch()
    (tmp_path / "a/linked").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "a/link.png").symlink_to(tmp_path / "b/0.PNG")
    (tmp_path / "a/nowhere.png").symlink_to(tmp_path / "gone.png")
    for part in ("a", "b"):
        every = sorted((tmp_path / part).rglob("*"))
        wanted = [str(p.relative_to(tmp_path / part)) for p in every if is_picture(p.name) and p.is_file()]
        assert pictures(str(tmp_path / part)) == wanted
    assert len(pictures(str(tmp_path / "a"))) == 8


def test_no_file_is_opened_but_the_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(12):
        write_image(tmp_path / f"{'abc'[i % 3]}/{i}.png", size=(90, 70), seed=i)
    opened = []
    before = Image.open
    monkeypatch.setattr(Image, "open", lambda source, **how: opened.append(source) or before(source, **how))
    some = load(str(tmp_path), samples=3)
    assert len(set(opened)) == 3
    assert len(opened) == 4  # the size of the first tells that of all
    whole, half = load(str(tmp_path), image_size=20), load(str(tmp_path), samples="50%", image_size=20)
    assert len(opened) == 4 + 12 + 6
    assert torch.equal(half.inputs, whole.inputs[:6])
    assert some.targets.sort().values.tolist() == [0, 1, 2]


def test_threads_decode_the_same_bytes(tmp_path: Path) -> None:
    for i in range(40):
        write_image(tmp_path / f"{i}.png", size=(30, 40), seed=i)

    def pixels(threads: int) -> np.ndarray:
        pictures = (decoding.Picture(39 - i, str(tmp_path / f"{i}.png"), f"picture {i}") for i in range(40))
        return decoding.decoded(pictures, name="forty", count=40, of=40, size=16, threads=threads)

    with Image.open(tmp_path / "39.png") as image:
        np.testing.assert_array_equal(pixels(1)[0], decoding.pixels(image, 16))
    np.testing.assert_array_equal(pixels(1), pixels(5))
    (tmp_path / "23.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="picture 23 cannot be decoded"):
        pixels(5)


def test_pictures_are_read_only_a_little_ahead(tmp_path: Path) -> None:
    write_image(tmp_path / "0.png")
    taken = []

    def pictures() -> Iterator[decoding.Picture]:
        for i in range(2000):
            taken.append(i)
            yield decoding.Picture(i, str(tmp_path / ("0.png" if i else "gone.png")), f"picture {i}")

    with pytest.raises(ValueError, match="picture 0 cannot be decoded"):
        decoding.decoded(pictures(), name="many", count=2000, of=2000, size=8, threads=1)
    assert len(taken) <= 16 * 7


def test_images_that_memory_does_not_hold_are_refused_before_one_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / f"a/{i}.png").write_bytes(b"broken")
    monkeypatch.setattr(memory, "available", lambda: 3 * 100 * 100 * 4 - 1)
    with pytest.raises(ValueError, match="4 samples of 30 kB need 120 kB of memory and 120 kB is free; give fewer"):
        load(str(tmp_path), image_size=100)
    with pytest.raises(ValueError, match="cannot be decoded"):
        load(str(tmp_path), image_size=99)


def test_the_size_in_memory_is_logged_before_decoding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(3):
        write_image(tmp_path / f"a/{i}.png", size=(300, 300), seed=i)
    with caplog.at_level("DEBUG", logger="landscape"):
        load(str(tmp_path), samples=2)
    assert [r.getMessage() for r in caplog.records] == [f"{tmp_path}: decoding 2 of 3 images to 224 x 224, 301 kB"]

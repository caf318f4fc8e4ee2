"""What checkpoints.md shows of data of one's own works as shown."""

import io
import pickle
import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from landscape.cli.main import exit_code
from landscape.data import corruptions
from landscape.results import reader

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parent.parent / "checkpoints.md").read_text().partition("## Bring your own data")[2]
COMMANDS = re.findall(r"\| `landscape (evaluate .*?)` \|", PAGE)
OF_PROBES = re.findall(r"\| `landscape ((?:corruption|perturbation) .*?)` \|", PAGE)
IMAGES = np.random.default_rng(0).integers(256, size=(30, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(30) % 3


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file of the page, weights of its models, and everything else that its commands name."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    for i, (pixels, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        for part in ("train", "val"):
            file = tmp_path / "photos" / part / f"class {label}" / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    np.savez(tmp_path / "set.npz", images=IMAGES, labels=LABELS)
    np.save(tmp_path / "X.npy", IMAGES)
    np.save(tmp_path / "Y.npy", LABELS)
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C/fog.npy", np.tile(IMAGES, (1, 4, 4, 1)))
    np.save(tmp_path / "CIFAR-10-C/labels.npy", np.tile(np.arange(6), 5))
    return tmp_path


def write_shards(folder: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures = []
    for pixels in IMAGES:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        pictures.append({"bytes": stream.getvalue(), "path": None})
    folder.mkdir()
    for part in ("train", "validation"):
        table = arrow.table({"image": pictures, "label": LABELS})
        parquet.write_table(table, folder / f"{part}-00000-of-00001.parquet")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition("--data ")[2])
def test_every_source_of_data_works_as_shown(command: str, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "--data shards" in command:
        write_shards(study / "shards")
    words = shlex.split(command)
    builder = words[words.index("--model") + 1].rpartition(":")[2]
    torch.manual_seed(0)
    torch.save(runpy.run_path(str(study / "mine.py"))[builder]().state_dict(), study / "weights.pt")
    assert exit_code(words) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    wanted = 40 if "--samples" in words else 60 if "mine.py:pair" in words or "mine.py:dataset" in words else 30
    assert f"{6 if 'cifar10-c:fog:3' in words else wanted} samples" in out
    assert "accuracy" in out


def published(folder: Path) -> None:
    """Test images of CIFAR-10, and the files of CIFAR-10-C, CIFAR-10-P and ImageNet-C in their layouts."""
    pixels = np.tile(IMAGES, (1, 4, 4, 1))
    (folder / "cifar-10-batches-py").mkdir()
    batch = {b"data": pixels.transpose(0, 3, 1, 2).reshape(30, -1), b"labels": LABELS.tolist()}
    (folder / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "CIFAR-10-P").mkdir()
    np.save(folder / "CIFAR-10-P/tilt.npy", np.stack([np.roll(pixels, t, axis=2) for t in range(3)], axis=1))
    np.save(folder / "CIFAR-10-C/labels.npy", np.tile(LABELS, 5))
    for i, name in enumerate(corruptions.SETS["common"]):
        np.save(folder / f"CIFAR-10-C/{name}.npy", np.tile(pixels, (5, 1, 1, 1)) + np.uint8(i))
        for severity in range(1, 6):
            (folder / "ImageNet-C" / name).mkdir(parents=True, exist_ok=True)
            (folder / "ImageNet-C" / name / str(severity)).symlink_to(folder / "photos/val")


@pytest.mark.campaign
@pytest.mark.parametrize("command", OF_PROBES, ids=lambda command: command.partition(" weights")[0])
def test_published_files_of_corrupted_images_are_found(
    command: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(study)
    words = shlex.split(command)
    builder = words[words.index("--model") + 1].rpartition(":")[2]
    torch.manual_seed(0)
    torch.save(runpy.run_path(str(study / "mine.py"))[builder]().state_dict(), study / "weights.pt")
    assert exit_code([*words, "--out", "r.h5"]) == 0, capsys.readouterr().err
    ((_, found),) = reader.groups("r.h5")
    assert found.attrs["source"].endswith(("of CIFAR-10-C", "of CIFAR-10-P", "of ImageNet-C"))


def test_the_page_has_an_example_of_every_source() -> None:
    assert (len(COMMANDS), len(OF_PROBES)) == (8, 3)

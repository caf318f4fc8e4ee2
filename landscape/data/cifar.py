"""Load CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from the official python or binary files, downloaded if missing.

And CIFAR-10-C and CIFAR-100-C, their test images under common corruptions (Hendrycks & Dietterich 2019).
"""

import _codecs
import hashlib
import io
import os
import pickle
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.checkpoints import restricted_unpickler
from landscape.data.dataset import Images
from landscape.data.file_contents import rows_sha256
from landscape.data.numpy_files import mapped
from landscape.data.sampling import Samples, Split, subset
from landscape.options import OptionError

SITE = "https://www.cs.toronto.edu/~kriz/"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
TIMEOUT = 3.0  # seconds, so that a machine without a network fails soon
# Globals that the official files name, in the spellings of numpy 1 and 2, and their stand-ins.
ALLOWED: Mapping[str, Callable[..., Any] | str] = {
    **restricted_unpickler.NUMPY,
    "numpy.ndarray": "ndarray",
    "numpy.dtype": lambda code, _align, _copy: restricted_unpickler.Dtype(code).checked(),
    "_codecs.encode": _codecs.encode,
}


@dataclass(frozen=True)
class Release:
    """File layout of one of the two data sets, and mean and std of its train split."""

    classes: int
    folder: str
    binary_folder: str
    files: Mapping[str, tuple[str, ...]]  # split -> files of the python layout; the binary layout appends .bin
    label: str  # key of the labels in a pickled batch
    label_bytes: int  # bytes before the pixels in a binary row; the last of them is the label
    meta: str  # the file of class names, which other tools expect beside the batches
    archive: str
    md5: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


RELEASES: Mapping[str, Release] = {
    "cifar10": Release(
        classes=10,
        folder="cifar-10-batches-py",
        binary_folder="cifar-10-batches-bin",
        files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        label="labels",
        label_bytes=1,
        meta="batches.meta",
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Release(
        classes=100,
        folder="cifar-100-python",
        binary_folder="cifar-100-binary",
        files={"train": ("train",), "test": ("test",)},
        label="fine_labels",
        label_bytes=2,
        meta="meta",
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def load(name: str, *, root: Path | None, split: Split) -> Images:
    """All images of a split, in file order; files and images may be fewer than the official ones.

    If neither layout is under the root (see `data_root`), the python archive is downloaded once.

    Raises:
        FileNotFoundError: there are neither files nor a network; names the files.
        ValueError: a file is damaged, or would run code to load.
    """
    release = RELEASES[name]
    root = data_root(root)
    parts = _parts(release, root, split)
    if not parts:
        _download_release(name, release, root, split)
        parts = _parts(release, root, split)
    pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return Images(pixels.reshape(-1, *SHAPE), labels, name, release.classes, SHAPE[-1], release.mean, release.std)


def data_root(root: Path | None) -> Path:
    """The folder that holds the CIFAR folders: the given one, else `$LANDSCAPE_DATA`, else `./data`."""
    return Path(root or os.environ.get("LANDSCAPE_DATA") or "data").expanduser()


def _parts(release: Release, root: Path, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    pickled = [root / release.folder / file for file in release.files[split]]
    binary = [root / release.binary_folder / f"{file}.bin" for file in release.files[split]]
    found = [_pickled(path, release) for path in pickled if path.is_file()]
    return found or [_binary(path, release) for path in binary if path.is_file()]


def _pickled(path: Path, release: Release) -> tuple[np.ndarray, np.ndarray]:
    content = read_batch(path)
    missing = [key for key in ("data", release.label) if key not in content]
    if missing:
        raise ValueError(f"{path} lacks the entry {missing[0]!r}; expected a batch of the official python layout")
    pixels, labels = content["data"], content[release.label]
    if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[1:] == (PIXELS,)):
        raise ValueError(f"{path} has no images: expected `data` as uint8 rows of {PIXELS}")
    return pixels, _checked(path, pixels, labels, release)


def _binary(path: Path, release: Release) -> tuple[np.ndarray, np.ndarray]:
    content = np.fromfile(path, np.uint8)
    row = release.label_bytes + PIXELS
    if content.size % row:
        raise ValueError(f"{path} has {content.size} bytes, expected rows of {row}; it is truncated, download it again")
    rows = content.reshape(-1, row)
    pixels = rows[:, release.label_bytes :]
    return pixels, _checked(path, pixels, rows[:, release.label_bytes - 1], release)


def _checked(path: Path, pixels: np.ndarray, labels: object, release: Release) -> np.ndarray:
    try:
        found = np.asarray(labels)
    except ValueError:  # a ragged list
        found = np.empty(0, object)
    if not len(pixels) or found.shape != (len(pixels),) or found.dtype.kind not in "iu":
        raise ValueError(f"{path} has {len(pixels)} images and labels that do not match; download the file again")
    if found.min() < 0 or found.max() >= release.classes:
        raise ValueError(
            f"{path} has labels {found.min()} to {found.max()}, expected 0 to {release.classes - 1}; "
            "download the file again"
        )
    return found.astype(np.int64)


class _BatchUnpickler(restricted_unpickler.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise pickle.UnpicklingError(f"it names the global {module}.{name}, which is refused")
        return super().find_class(module, name)


def read_batch(path: Path) -> dict[str, Any]:
    """The dict of one batch file: str keys, arrays as numpy arrays, byte strings of Python 2 as bytes.

    Raises:
        ValueError: the file is damaged, names a global outside `ALLOWED`, or is not a dict.
    """
    try:
        content = _BatchUnpickler(io.BytesIO(path.read_bytes()), ALLOWED, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        values = ((key, v.value() if isinstance(v, restricted_unpickler.Array) else v) for key, v in content.items())
        return {restricted_unpickler.text(key): value for key, value in values}
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path} is not a CIFAR batch: {reason}; expected a dict of numpy arrays and lists; download the file again"
        ) from None


def _download_release(name: str, release: Release, root: Path, split: str) -> None:
    looked = (
        f"{root / release.folder}/ for {', '.join(release.files[split])} and in "
        f"{root / release.binary_folder}/ for {', '.join(f'{file}.bin' for file in release.files[split])}"
    )
    advice = "give the folder that holds them with --data-root, or try --data digits, which needs no files"
    if (root / release.folder).is_dir():  # never mix a download with the user's files
        raise FileNotFoundError(f"no {name} {split} files: looked in {looked}; {advice}")
    files = (*release.files["train"], *release.files["test"], release.meta)
    url = SITE + release.archive
    try:
        download(url, md5=release.md5, root=root, folder=release.folder, files=files)
    except (OSError, HTTPException) as error:
        raise FileNotFoundError(
            f"no {name}: looked in {looked}, and {url} cannot be downloaded ({error}); {advice}"
        ) from None


def download(url: str, *, md5: str, root: Path, folder: str, files: Sequence[str]) -> None:
    """Download a `.tar.gz` and keep the named regular files as `root/folder`.

    The folder appears complete or not at all. Members are looked up by name and written under fixed names, so that no
    path inside the archive is followed.

    Raises:
        OSError, http.client.HTTPException: no network, no response, no space, or no permission to write.
        ValueError: the archive has another checksum, or lacks a file.
    """
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder}.", dir=root) as temporary:
            archive = Path(temporary) / "archive.tar.gz"
            with archive.open("wb") as stream:
                shutil.copyfileobj(response, stream)
            with archive.open("rb") as stream:
                found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != md5:
                raise ValueError(f"{url} has the MD5 {found}, expected {md5}; nothing was kept; try again")
            unpacked = Path(temporary) / folder
            unpacked.mkdir()
            _extract(archive, unpacked, files, url)
            try:
                unpacked.rename(root / folder)
            except OSError:  # another process was faster: its folder passed the same check
                if not all((root / folder / file).exists() for file in files):
                    raise


def _extract(archive: Path, folder: Path, files: Sequence[str], url: str) -> None:
    with tarfile.open(archive, "r:gz") as content:
        regular = {member.name: member for member in content if member.isfile()}
        for file in files:
            name = f"{folder.name}/{file}"
            stream = content.extractfile(regular[name]) if name in regular else None
            if stream is None:
                raise ValueError(f"{url} lacks the file {name}; expected the official archive")
            with stream, (folder / file).open("wb") as target:
                shutil.copyfileobj(stream, target)


SEVERITIES = 5
FOLDERS = {"cifar10-c": ("CIFAR-10-C", "cifar10"), "cifar100-c": ("CIFAR-100-C", "cifar100")}
LABELS = "labels"


def is_corrupted(name: str) -> bool:
    """Whether a name starts with one of these data sets."""
    return name.partition(":")[0] in FOLDERS


def folder_of(clean: str, root: Path | None) -> Path | None:
    """The folder of the corrupted test images of a data set under a data root; None where there is none."""
    place = next((place for place, name in FOLDERS.values() if name == clean), None)
    found = data_root(root) / place if place else None
    return found if found is not None and names_in(found) else None


def names_in(folder: Path) -> tuple[str, ...]:
    """The corruptions, or perturbations, whose files a folder holds; none if it is no folder."""
    return tuple(sorted(path.stem for path in folder.glob("*.npy") if path.stem != LABELS))


def load_corrupted(name: str, *, root: Path | None, split: str, samples: Samples) -> Images:
    """One corruption at one severity: `cifar10-c:CORRUPTION:SEVERITY`, severity 1 to 5.

    `ROOT/CIFAR-10-C/CORRUPTION.npy` holds the test images once per severity, (5 N, 32, 32, 3) uint8, N 10,000;
    `labels.npy` their classes (5 N,). Only the selected rows are read. Row i is test image i, so that the
    class-balanced order is that of the clean test split.

    Raises:
        OptionError: the severity is out of range, or the split is train, which has no corruptions.
        FileNotFoundError: there is no such folder or corruption; names the existing ones.
        ValueError: the files do not match.
    """
    short, *words = name.split(":")
    if len(words) != 2 or not all(words):
        raise OptionError(f"--data {name} is incomplete; give {short}:CORRUPTION:SEVERITY such as {short}:fog:3")
    if words[1] not in map(str, range(1, SEVERITIES + 1)):
        raise OptionError(f"--data {name}: the severity must be 1 to {SEVERITIES}, got {words[1]}")
    corruption, severity = words[0], int(words[1])
    if split != "test":
        raise OptionError(f"--data {name} has a test split only; give that one")
    place, clean = FOLDERS[short]
    release = RELEASES[clean]
    folder = data_root(root) / place
    images, labels = _array(folder, corruption, name), _array(folder, "labels", name)
    each, rest = divmod(len(images), SEVERITIES)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3) or rest or labels.shape != (len(images),):
        raise ValueError(
            f"{folder}/{corruption}.npy is {images.dtype} {images.shape} and labels.npy {labels.shape}; "
            "expected uint8 (50000, 32, 32, 3) and (50000,); download them again"
        )
    of_severity = slice(each * (severity - 1), each * severity)
    targets = np.array(labels[of_severity], np.int64)
    if not each or targets.min() < 0 or targets.max() >= release.classes:
        raise ValueError(f"{folder}/labels.npy has other classes than 0 to {release.classes - 1}; download it again")
    rows = subset(targets, samples)
    pixels = np.empty((len(rows), 3, 32, 32), np.uint8)
    for position in np.argsort(rows):  # in the order of the file
        pixels[position] = images[of_severity][rows[position]].transpose(2, 0, 1)
    inputs, labels_of_rows = torch.from_numpy(pixels), torch.from_numpy(targets[rows])
    about = name, release.classes, 32, release.mean, release.std
    return Images(inputs, labels_of_rows, *about, available=each)


def content(folder: Path, corruption: str, severities: Sequence[int], samples: Samples) -> list[str]:
    """Digests of the images and classes of one corruption that `load` reads.

    Raises:
        FileNotFoundError, ValueError: as `load`.
    """
    name = f"{folder.name.lower()}:{corruption}"
    images, labels = _array(folder, corruption, name), _array(folder, LABELS, name)
    each = len(images) // SEVERITIES
    rows = [
        each * (severity - 1) + subset(np.array(labels[each * (severity - 1) : each * severity], np.int64), samples)
        for severity in severities
    ]
    return [rows_sha256(folder / f"{stem}.npy", np.concatenate(rows)) for stem in (corruption, LABELS)]


def _array(folder: Path, stem: str, name: str) -> Any:
    path = folder / f"{stem}.npy"
    if not path.is_file():
        there = names_in(folder)
        known = f"there are {', '.join(there)}" if there else "the folder is missing or empty"
        raise FileNotFoundError(
            f"--data {name}: there is no {path} ({known}); "
            f"unpack {folder.name}.tar under --data-root, or give an existing one"
        )
    return mapped(path)

"""Make the common corruptions of images (Hendrycks & Dietterich 2019, arXiv 1903.12261), and keep them for later runs.

They are made by a package: `imagecorruptions` itself fails with NumPy 2 and scikit-image 0.19, its maintained fork
`imagecorruptions-imaug` has the same functions. Their severities are those of ImageNet-C, made for 224 px: on images of
32 px they are stronger than the files of CIFAR-10-C.
"""

import contextlib
import hashlib
import importlib
import logging
import shutil
import threading
import warnings
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from landscape.checkpoints.user_code import kept_rng
from landscape.data import memory, user_cache
from landscape.options import OptionError, did_you_mean, first_line
from landscape.probe import derived_seed

NAMES = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # of the authors' validation set
SETS = {"common": NAMES, "all": (*NAMES, *EXTRA)}
SEVERITIES = (1, 2, 3, 4, 5)
PACKAGE = "imagecorruptions-imaug"
SEEDED = ("impulse_noise", "glass_blur")  # functions that take a seed; the others draw from NumPy's global generator
_drawing = threading.Lock()  # that generator belongs to one thread at a time


def parse_names(text: str) -> tuple[str, ...]:
    """The corruptions that `common`, `all` or `fog,snow` means.

    Raises:
        OptionError: a name is unknown or given twice; says the nearest.
    """
    if text in SETS:
        return SETS[text]
    names = tuple(part.strip().replace("-", "_") for part in text.split(","))
    for name in names:
        if name not in SETS["all"]:
            hint = did_you_mean(name, [*SETS["all"], *SETS])
            known = f"{', '.join(SETS['all'])}, or common or all"
            raise OptionError(f"--corruptions has no corruption {name or 'without a name'}; expected {known}{hint}")
    if len(set(names)) < len(names):
        raise OptionError(f"--corruptions names a corruption twice: {text}; give each once")
    return names


def parse_severities(text: str) -> tuple[int, ...]:
    """The severities that `1,3,5` means. Raises OptionError: one is not 1 to 5, or given twice."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in map(str, SEVERITIES):
            raise OptionError(
                f"--severities must be 1 to {SEVERITIES[-1]}, separated by commas, got {text or 'nothing'}"
            )
    if len(set(parts)) < len(parts):
        raise OptionError(f"--severities names a severity twice: {text}; give each once")
    return tuple(map(int, parts))


def maker() -> str:
    """Name and version of the package that makes corruptions.

    Raises:
        ValueError: it is not installed; gives the command that installs it.
    """
    _library()
    for package in (PACKAGE, "imagecorruptions"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    return "imagecorruptions"


def corrupted(images: Tensor, name: str, severity: int, seed: int, *, first: int = 0) -> Tensor:
    """Corrupted copies of images (N, 3, H, W) uint8, each drawn from (seed, name, severity, its row).

    `first` is the row of the first image, so that the division into blocks does not matter.

    Raises:
        ValueError: the package is not installed, or fails on such images.
    """
    library: Any = _library()
    pixels, made = images.permute(0, 2, 3, 1).numpy(), np.empty(images.shape, np.uint8)
    with _drawing, kept_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the package
        for row, picture in enumerate(pixels):
            own = derived_seed(seed, name, severity, first + row) % 2**32
            np.random.seed(own)  # noqa: NPY002 the package draws from it
            more = {"seed": own} if name in SEEDED else {}
            try:
                found = getattr(library, name)(Image.fromarray(picture), severity, **more)
            except Exception as error:  # such as a name that newer libraries no longer have
                reason = first_line(error)
                raise ValueError(
                    f"{name} of severity {severity} cannot be made for images of {images.shape[3]} x {images.shape[2]} "
                    f"px by {maker()} ({reason}); pip install -U {PACKAGE}, or leave it out with --corruptions"
                ) from None
            made[row] = np.asarray(found).astype(np.uint8).transpose(2, 0, 1)
    return torch.from_numpy(made)


def _library() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("imagecorruptions")
    except ImportError as error:
        raise ValueError(
            f"corruptions are made by the package {PACKAGE}, which cannot be imported ({error}); "
            f"pip install {PACKAGE}, or give a folder of CIFAR-10-C or ImageNet-C with --source"
        ) from None


def names_in(folder: Path) -> tuple[str, ...]:
    """The corruptions that a folder holds, also one level further down as the archives are named (noise, blur, ...)."""
    return tuple(name for name in SETS["all"] if _of(folder, name) is not None)


def pictures(folder: Path, name: str, severity: int) -> Path:
    """The folder of class folders of a corruption at a severity.

    Raises:
        FileNotFoundError: there is none; names the existing corruptions or severities.
    """
    place = _of(folder, name)
    if place is None:
        raise FileNotFoundError(f"{folder} has no folder {name}; it has {', '.join(names_in(folder)) or 'none'}")
    if not (place / str(severity)).is_dir():
        there = ", ".join(str(s) for s in SEVERITIES if (place / str(s)).is_dir())
        raise FileNotFoundError(f"{place} has no severity {severity}; it has {there or 'none'}; unpack it again")
    return place / str(severity)


def _of(folder: Path, name: str) -> Path | None:
    candidates = (folder / name, *sorted(folder.glob(f"*/{name}")))
    return next((path for path in candidates if any((path / str(s)).is_dir() for s in SEVERITIES)), None)


MOST_BYTES = 4 * 2**30  # of all kept corruptions; more are made again each time
FREE = 4  # times the size of a file that has to be free on the disk
BLOCK = 256  # images that are made at a time
_log = logging.getLogger(__name__)


def kept(clean: Tensor, name: str, severity: int, seed: int) -> Tensor:
    """`corrupted` of all images (N, 3, H, W), read from the cache where they are known.

    The file is found by the digest of the clean images, package, seed, corruption and severity; a file whose content
    has another digest than when it was written is made again.
    """
    place = user_cache.folder("corruptions", "generated corruptions")
    key = f"{maker()};{seed};{name};{severity};{tuple(clean.shape)};".encode()
    digest = hashlib.sha256(key + clean.contiguous().numpy().tobytes()).hexdigest()[:32]
    path = place / f"{digest}.uint8" if place is not None else None
    if path is not None and (found := _read(path, tuple(clean.shape))) is not None:
        return found
    blocks = [
        corrupted(part, name, severity, seed, first=BLOCK * i) for i, part in enumerate(torch.split(clean, BLOCK))
    ]
    made = torch.cat(blocks)
    if path is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk: they are made again next time
            _write(path, made.numpy())
    return made


def _read(path: Path, shape: tuple[int, ...]) -> Tensor | None:
    if not all(map(user_cache.is_own, (path, path.with_suffix(".sha256")))):
        return None
    try:
        content, digest = path.read_bytes(), path.with_suffix(".sha256").read_text()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(content).hexdigest() != digest or len(content) != int(np.prod(shape)):
        _log.warning("note: %s is damaged; these images are made again", path)
        return None
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape).copy())


def _write(path: Path, made: np.ndarray) -> None:
    used = sum(file.stat().st_size for file in path.parent.glob("*.uint8"))
    if used + made.nbytes > MOST_BYTES or FREE * made.nbytes > shutil.disk_usage(path.parent).free:
        _log.debug("generated corruptions are not kept: %s in %s already", memory.format_bytes(used), path.parent)
        return
    content = made.tobytes()
    for target, data in ((path, content), (path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())):
        user_cache.write(target, data)

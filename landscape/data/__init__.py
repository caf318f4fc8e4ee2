"""Load data sets by name, folder, file or callable, as tensors in memory and in a fixed order."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from landscape.checkpoints.user_code import refuse_file_alone
from landscape.data import cifar, digits, image_folder, masks, numpy_files, parquet, torch_dataset
from landscape.data.augment import Augmentation
from landscape.data.dataset import Batches, BatchList, Images
from landscape.data.preprocessing import Resize, resize_images, resized
from landscape.data.sample_reading import Request
from landscape.data.sampling import Samples, Split, number_of, subset
from landscape.data.structure import BatchLayout
from landscape.options import at_least, one_of, reading
from landscape.plugins import place_of

__all__ = ["NAMES", "Augmentation", "BatchLayout", "BatchList", "Batches", "Images", "Split", "load", "load_batches"]

NAMED: Mapping[str, Callable[..., Images]] = {  # called with `root` and `split`
    "digits": lambda *, root, split: digits.load(split),
    **{name: partial(cifar.load, name) for name in cifar.RELEASES},
}
NAMES = tuple(NAMED)
FORMS = (
    "a folder of class folders or of images/ and masks/, FILE.parquet or a folder of them, FILE.npz, X.npy,Y.npy, "
    "file.py:callable, module:callable, or a token file .npy"
)


def load_batches(
    name: str,
    *,
    root: Path | None = None,
    split: Split = "test",
    samples: Samples = None,
    image_size: int | None = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    resize: Resize | None = None,
    block_size: int | None = None,
    layout: Callable[[], BatchLayout] = BatchLayout,
    batch_size: int = 128,
    whole: bool = False,
    ordered: bool = False,
) -> Images | BatchList:
    """A data set in memory: the first `samples` of its fixed order, or all if it has fewer.

    Images are in a seeded class-balanced order that never changes (see `sampling.balanced`); a pair of tensors from a
    callable, a DataLoader, and arrays whose targets are not class numbers keep their own order.

    Args:
        name: `digits`, `cifar10`, `cifar100`, `cifar10-c:CORRUPTION:SEVERITY`, a folder of class folders, of
            pictures and masks, of parquet shards or of a pair of `.npy` files, `FILE.parquet`, `FILE.npz`,
            `X.npy,Y.npy`, `file.py:callable`, `module:callable`, or a token file `.npy`.
        root: the folder that holds the CIFAR folders; else `$LANDSCAPE_DATA`, else `./data`.
        split: "train" or "test"; a callable with a parameter `split` gets it. Sources without these parts give the
            same samples for both, and say so (`Images.one_part`).
        samples: how many images: a number, a share such as "10%", None or "all" for all.
        image_size: side to which images are resized; tensors from a callable keep their own.
        mean: per channel, of pixels in [0, 1], in place of the data set's own.
        std: goes with `mean`; both apply to uint8 images only, as floating-point inputs count as normalised.
        resize: how pictures are resized; None: bilinear, the shorter side to the size, centre crop.
        block_size: tokens per sequence of a token file.
        layout: how the model takes the samples of a callable, called if they are not pairs of tensors.
        batch_size: of samples of a callable that are not one input and one target tensor each (`BatchList`).
        whole: the loss takes whole batches, so that samples keep entries that the model does not take.
        ordered: keep the order of the source, such as frames of a stream.

    Raises:
        OptionError: `samples` or `image_size` is below 1, or the split unknown.
        FileNotFoundError: a folder or file is missing and cannot be downloaded.
        ValueError: the name is unknown, a file is damaged, or values do not match.
    """
    one_of("split", split, get_args(Split))
    number_of(samples, 100)
    at_least("image_size", 1 if image_size is None else image_size, 1)
    name = place_of("data", name)
    if numpy_files.is_tokens(name):
        return numpy_files.load_tokens(name, samples=samples, block_size=block_size)
    with reading(name, says=True):
        images = _load(Request(name, samples, image_size, resize, layout, batch_size, whole, ordered), root, split)
    if isinstance(images, BatchList):
        return images
    images = replace(images, resized_from=resize.seen) if resize else images
    return _normalised(images, tuple(mean), tuple(std)) if mean and std else images


def load(name: str, **options: Any) -> Images:
    """As `load_batches`, for whoever needs one input and one target tensor per sample.

    Raises:
        ValueError: the samples have another structure.
    """
    made = load_batches(name, **options)
    if isinstance(made, BatchList):
        raise ValueError(f"{name} gives mini-batches of several tensors; expected one input and one target per sample")
    return made


def _normalised(images: Images, mean: tuple[float, ...], std: tuple[float, ...]) -> Images:
    """uint8 images with another mean and std than their own; other inputs as they are."""
    if images.inputs.dtype != torch.uint8 or images.inputs.ndim != 4:
        return images
    channels = images.inputs.shape[1]
    if not len(mean) == len(std) == channels:
        raise ValueError(
            f"{images.name} has {channels} channels, but mean and std have {len(mean)} and {len(std)} values; "
            "give one of each per channel"
        )
    return replace(images, mean=mean, std=std)


def _load(request: Request, root: Path | None, split: Split) -> Images | BatchList:
    name, samples, image_size, resize = request.name, request.samples, request.image_size, request.resize
    path = Path(name).expanduser()
    if name in NAMES:
        every = NAMED[name](root=root, split=split)
        taken = every.take(subset(every.targets.numpy(), samples, ordered=request.ordered))
        return _sized(replace(taken, available=len(every)), image_size, resize)
    if cifar.is_corrupted(name):
        return _sized(cifar.load_corrupted(name, root=root, split=split, samples=samples), image_size, resize)
    if (
        path.suffix == ".npz"
        or numpy_files.pair_of_files(name)
        or (path.is_dir() and numpy_files.pair_of_split(path, split))
    ):
        images = numpy_files.load(name, split=split, samples=samples, ordered=request.ordered)
        return _sized(images, image_size, resize) if images.mean else images
    if path.suffix == ".parquet" or (path.is_dir() and parquet.files_in(path)):
        return parquet.load(name, split=split, samples=samples, image_size=image_size, resize=resize)
    if path.is_dir() and masks.folder_of_split(path, split):
        return masks.load(name, split=split, samples=samples, ordered=request.ordered)
    if path.is_dir():
        return image_folder.load(
            name, split=split, samples=samples, image_size=image_size, resize=resize, ordered=request.ordered
        )
    check_name(name)
    return torch_dataset.load(request, split)


def check_name(name: str) -> None:
    """Raise a ValueError or FileNotFoundError if a name is that of no data set, folder or callable; nothing is read."""
    name = place_of("data", name)
    path = Path(name).expanduser()
    files = path.suffix in (".npz", ".parquet") or numpy_files.pair_of_files(name) or numpy_files.is_tokens(name)
    if name in NAMES or cifar.is_corrupted(name) or files or path.is_dir():
        return
    refuse_file_alone("data", name)
    if ":" in name:
        return
    if path.is_file():
        raise ValueError(f"--data {name} is a file; expected {FORMS}")
    if "/" in name:
        raise FileNotFoundError(f"--data {name}: no such folder; expected {FORMS}")
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"--data {name!r} is unknown; expected {', '.join(NAMES)}, {FORMS}{hint}")


def _sized(images: Images, image_size: int | None, resize: Resize | None) -> Images:
    """uint8 images at the requested size, resized with Pillow if `resize` is given."""
    if resize is None or not images.size or images.inputs.shape[1] != 3:
        return resized(images, image_size)
    return resize_images(images, image_size or images.size, resize)

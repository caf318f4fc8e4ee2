"""Load NumPy arrays from a `.npz` file, a pair of `.npy` files or a folder of such a pair; and files of tokens."""

import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy

from landscape.data import dataset, memory, preprocessing, sampling
from landscape.data.image_folder import SPLITS
from landscape.options import OptionError, at_least
from landscape.results.declared_size import SLACK, refuse_oversized

PACKED = 64  # largest ratio of an array to its compressed file, such as one of masks
T = TypeVar("T")
# Names of inputs and targets in an archive or a folder; also with a split, as in x_train or train_x.
PAIRS = (
    ("images", "labels"), ("x", "y"),
    ("inputs", "targets"), ("data", "labels"), ("arr_0", "arr_1"),
    ("images", "masks"), ("frames", "labels"), ("frames", "masks"),
)  # fmt: skip
CHANNELS = (1, 3)


def pair_of_files(name: str) -> tuple[str, str] | None:
    """The two files of `X.npy,Y.npy`; None for a name of another form."""
    inputs, comma, targets = name.partition(".npy,")
    return (f"{inputs}.npy", targets) if comma and targets.endswith(".npy") else None


def pair_of_split(folder: Path, split: sampling.Split) -> tuple[Path, Path] | None:
    """A pair of `.npy` files in the folder of the split, else in the folder itself; None if there is none."""
    places = (*(folder / part for part in SPLITS[split]), folder)
    found = ((place, names) for place in places if (names := _pair_in(_stems(place), split)))
    return next(((place / f"{x}.npy", place / f"{y}.npy") for place, (x, y) in found), None)


def load(name: str, *, split: sampling.Split, samples: sampling.Samples, ordered: bool = False) -> dataset.Images:
    """Inputs and targets from arrays; only the selected rows of a `.npy` file are read from disk.

    Class numbers (N,) or (N, 1) give the class-balanced order; `ordered`, or with others, rows keep their order. uint8
    inputs are images (N, H, W, C), (N, C, H, W) or (N, H, W): the last axis holds the channels if its length is 1 or 3
    and that of axis 1 is not, else axis 1 does. They get ImageNet's mean and std (0.5 if they are not RGB). Numbers of
    other types are taken to be normalised, and used as they are.

    Raises:
        FileNotFoundError: there is no such file, or no pair for this split.
        ValueError: a file is damaged or holds Python objects, or the arrays do not match.
    """
    pair, path, whole = pair_of_files(name), Path(name).expanduser(), True
    if pair is not None:
        x, y = (mapped(Path(file).expanduser()) for file in pair)
    elif name.endswith(".npz"):
        x, y, whole = _archived(path, split)
    else:
        files = pair_of_split(path, split)
        assert files is not None
        x, y = map(mapped, files)
        whole = files == pair_of_split(path, "train" if split == "test" else "test")
    return replace(_images(name, x, y, samples, ordered), one_part=whole)


def _images(name: str, x: np.ndarray, y: np.ndarray, samples: sampling.Samples, ordered: bool) -> dataset.Images:
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
        raise ValueError(
            f"{name} holds inputs {x.shape} and targets {y.shape}; expected the same number of rows in both"
        )
    for what, array in (("inputs", x), ("targets", y)):
        if array.dtype.kind not in "uifb":
            raise ValueError(f"{name}: the {what} are {array.dtype}; expected numbers")
    y = y.astype(np.int64) if y.dtype == bool else y
    labels = np.asarray(y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind in "ui" else y)
    numbers = labels.ndim == 1 and labels.dtype.kind in "ui"
    every = np.arange(sampling.number_of(samples, len(x)))
    rows = sampling.subset(labels.astype(np.int64), samples) if numbers and not ordered else every
    memory.require(name, len(rows), x.dtype.itemsize * math.prod(x.shape[1:]))
    taken = np.empty((len(rows), *x.shape[1:]), _of_torch(x.dtype))
    for position in np.argsort(rows):  # of a memory map, in the order of the file
        taken[position] = x[rows[position]]
    inputs = torch.from_numpy(_channels_first(name, taken))
    wanted = np.array(labels, dtype=_of_torch(labels.dtype))  # a copy in memory: torch has no read-only tensors
    targets = torch.from_numpy(wanted.astype(np.int64) if wanted.dtype.kind in "ui" else wanted)
    mean, std = preprocessing.default_normalisation(inputs)
    classes = dataset.number_of_classes(targets)
    return dataset.Images(
        inputs, targets[rows], name, classes, dataset.square_side(inputs), mean, std, counted=True, available=len(x)
    )


def _of_torch(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the same numbers that torch has: of more than double precision double precision."""
    return np.dtype(np.float64) if dtype.kind == "f" and dtype.itemsize > 8 else dtype.newbyteorder("=")


def _channels_first(name: str, x: np.ndarray) -> np.ndarray:
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.ndim == 4 and x.shape[1] in CHANNELS:
        return x
    raise ValueError(
        f"{name} holds uint8 inputs {x.shape}; expected images (N, H, W, C), (N, C, H, W) or (N, H, W) with 1 or 3 "
        "channels; give anything else as normalised floating-point numbers"
    )


def mapped(path: Path) -> np.ndarray:
    """The array of a `.npy` file, which is not in memory.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is damaged or holds Python objects.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected an array that numpy.save wrote")
    array = _one_line_error(path, lambda: np.load(path, mmap_mode="r", allow_pickle=False))
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive, not an array; name it with the suffix .npz")
    return array


def _archived(path: Path, split: sampling.Split) -> tuple[np.ndarray, np.ndarray, bool]:
    """Inputs and targets of a split, and whether the other split has the same."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; expected an archive that numpy.savez wrote")
    with _one_line_error(path, lambda: zipfile.ZipFile(path)) as archive:
        stems = {member.removesuffix(".npy"): member for member in archive.namelist() if member.endswith(".npy")}
        names = _pair_in(stems, split)
        if names is None:
            pairs = ", ".join(f"{a} and {b}" for a, b in PAIRS)
            raise ValueError(
                f"{path} holds {', '.join(stems) or 'no arrays'}; expected inputs and targets named {pairs}, "
                f"for the {split} split also x_{split} and the like"
            )
        x, y = (_one_line_error(path, partial(_member, path, archive, stems[name])) for name in names)
    return x, y, _pair_in(stems, "train") == _pair_in(stems, "test")


def _member(path: Path, archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """One array of an archive, whose size is checked before it is read."""
    with archive.open(member) as stream:
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(stream)
    size = math.prod(shape) * dtype.itemsize
    refuse_oversized(str(path), member, size, path.stat().st_size, expansion=PACKED, slack=SLACK)
    memory.require(f"{path}: {member}", math.prod(shape), dtype.itemsize)
    with archive.open(member) as stream:
        return np.asarray(npy.read_array(stream, allow_pickle=False))


def _one_line_error(path: Path, function: Callable[[], T]) -> T:
    """Turn whatever numpy raises on a damaged file into a one-line error."""
    try:
        return function()
    except memory.TooLarge:
        raise
    except Exception as error:
        pickled = any(word in str(error) for word in ("allow_pickle", "pickled", "Python objects"))
        reason = "it holds Python objects, which are never unpickled" if pickled else str(error) or "truncated"
        raise ValueError(f"{path} cannot be read ({reason}); write it again with numpy.save or numpy.savez") from None


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.npy")) if folder.is_dir() else []


def _pair_in(names: Iterable[str], split: sampling.Split) -> tuple[str, str] | None:
    """The names of inputs and targets among those given: with the name of the split, else without."""
    known = {name.lower(): name for name in names}
    for part in (*SPLITS[split], ""):
        for pair in PAIRS:
            for form in ("{name}_{part}", "{part}_{name}") if part else ("{name}",):
                words = [form.format(name=name, part=part) for name in pair]
                if all(word in known for word in words):
                    return known[words[0]], known[words[1]]
    return None


SUFFIX = ".npy"


def is_tokens(name: str) -> bool:
    """Whether a name is that of a token file."""
    return name.endswith(SUFFIX) and not pair_of_files(name) and Path(name).expanduser().is_file()


def load_tokens(name: str, *, samples: sampling.Samples, block_size: int | None) -> dataset.Images:
    """The first `samples` sequences of a token file, in a fixed seeded order; both splits are the whole file.

    A 1-D array is split into blocks of `block_size` inputs, whose targets are shifted by one token: each token but the
    first is predicted once, and a remainder shorter than a block is left out. Rows of a 2-D array are sequences: the
    first T - 1 of T tokens are inputs, the last T - 1 targets; `block_size` shortens them. Only the selected sequences
    are read.

    Raises:
        OptionError: the block size is missing, or larger than the file.
        ValueError: the file is not an array of token numbers.
    """
    if block_size is not None:
        at_least("block_size", block_size, 1)
    path = Path(name).expanduser()
    array = mapped(path)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected token numbers, "
            f"one sequence (1-D) or several (2-D); images go with their targets: --data {name},TARGETS.npy"
        )
    if array.ndim == 1:
        if block_size is None:
            raise OptionError(
                f"{name} is one sequence of {len(array)} tokens; give the tokens per block with --block-size N"
            )
        count, length = (len(array) - 1) // block_size, block_size
    else:
        count, length = len(array), min(array.shape[1] - 1, block_size or array.shape[1])
    if count < 1 or length < 1:
        raise OptionError(
            f"{name} has {array.size} tokens, too few for a block of {block_size or 1} and the token after it; "
            "give a smaller --block-size or a longer file"
        )
    selected = sampling.shuffled(count)[: sampling.number_of(samples, count)]
    rows = [array[i * length :][: length + 1] if array.ndim == 1 else array[i, : length + 1] for i in selected]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    if tokens.min() < 0:
        raise ValueError(f"{name} has the token {int(tokens.min())}; expected numbers from 0 upward, without padding")
    return dataset.Images(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), name, int(tokens.max()) + 1, 0,
        one_part=True, available=count,
    )  # fmt: skip

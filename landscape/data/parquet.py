"""Load images from parquet files with the layout of Hugging Face data sets, read with pyarrow (the extra `parquet`)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from landscape.data import decoding, structure
from landscape.data.dataset import Images
from landscape.data.numpy_files import PACKED
from landscape.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Resize
from landscape.data.sampling import Samples, Split, subset
from landscape.options import first_line
from landscape.results.declared_size import SLACK, refuse_oversized, refuse_special

SPLITS = {"train": ("train",), "test": ("test", "validation", "valid", "val")}  # the first with labels
SPLIT_OF = re.compile(r"(train|test|validation|valid|val)(?![a-z])")


@dataclass(frozen=True)
class Columns:
    """The columns of pictures and classes, and the number of classes that the file names (0 if none)."""

    image: str
    label: str
    classes: int


def files_in(folder: Path) -> list[Path]:
    """The parquet files in a folder, else in its folder `data`, where data set repositories keep them."""
    return sorted(folder.glob("*.parquet")) or sorted(folder.glob("data/*.parquet"))


def load(name: str, *, split: Split, samples: Samples, image_size: int | None, resize: Resize | None) -> Images:
    """The first `samples` images of one parquet file, or of the shards in a folder, in the class-balanced order.

    Shards named train-*, test-* or validation-* belong to that split (test: the validation shards if there are no test
    shards, or these have no labels); other shards are used for both. The column of pictures holds encoded bytes or
    `{bytes, path}`, the column of classes whole numbers or strings; both are found by type and name. Labels are read at
    once, pictures by row group, of which only the selected rows are decoded.

    Raises:
        FileNotFoundError: there is no shard for this split.
        ValueError: pyarrow is not installed, a column is missing, a file is damaged, a picture cannot be decoded.
    """
    path = Path(name).expanduser()
    shards = files_in(path) if path.is_dir() else [path]
    parts = _parts(path, shards, split)
    columns = _columns(_opened(parts[0][0]), parts[0][0])
    every = [np.concatenate([_labels(shard, columns.label) for shard in part]) for part in parts]
    at = next((i for i, labels in enumerate(every) if labels.dtype.kind != "i" or labels.min(initial=0) >= 0), None)
    if at is None:
        raise ValueError(
            f"{name}: the {split} split has no labels (class -1); give the train split, or labelled shards"
        )
    targets, classes = _numbered(every[at], shards, columns)
    if not len(targets):
        raise ValueError(f"{name} has no rows for the {split} split; expected at least one image")
    rows = subset(targets, samples)
    pictures = partial(_pictures, parts[at], columns, rows)
    size = image_size or decoding.common_size(decoding.sizes(pictures()))
    inputs = decoding.decoded(pictures(), name=name, count=len(rows), of=len(targets), size=size, resize=resize)
    labels = torch.from_numpy(targets[rows])
    pixels, whole = torch.from_numpy(inputs), _unsplit(path, shards)
    normalised = IMAGENET_MEAN, IMAGENET_STD
    return Images(pixels, labels, name, classes, size, *normalised, one_part=whole, available=len(targets))


def _opened(path: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(
            "parquet files are read with pyarrow, which is not installed; pip install pyarrow, "
            "or install landscape with its extra [parquet]"
        ) from None
    refuse_special(path)
    try:
        return ParquetFile(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; expected a parquet file") from None
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        reason = first_line(error)
        raise ValueError(f"{path} is not a readable parquet file ({reason}); download it again") from None


def _parts(path: Path, shards: Sequence[Path], split: str) -> list[list[Path]]:
    """Shards of this split, one list for each name that the split may have; all shards if none names a split."""
    if _unsplit(path, shards):
        return [list(shards)]
    by_split: dict[str, list[Path]] = {}
    for shard in shards:
        by_split.setdefault(_split_in(shard), []).append(shard)
    existing = [by_split[part] for part in SPLITS[split] if part in by_split]
    if not existing:
        raise FileNotFoundError(
            f"{path} has shards for {', '.join(filter(None, by_split))} but none for the {split} split; "
            "give the other split, or one parquet file"
        )
    return existing


def _split_in(shard: Path) -> str:
    """The split that the name of a shard says, "" for none."""
    match = SPLIT_OF.match(shard.name.lower())
    return match.group(1) if match else ""


def _unsplit(path: Path, shards: Sequence[Path]) -> bool:
    """Whether the shards serve both splits: a single file, or no name with a split."""
    return not path.is_dir() or not any(map(_split_in, shards))


def _columns(file: Any, path: Path) -> Columns:
    schema = file.schema_arrow
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    kinds = {name: str(schema.field(name).type) for name in schema.names}
    pictures = [name for name, kind in kinds.items() if re.match(r"(large_)?binary|struct<.*\bbytes: ", kind)]
    image = structure.first_of(structure.INPUTS, pictures) or (pictures[0] if len(pictures) == 1 else None)
    numbers = [name for name, kind in kinds.items() if kind.startswith(("int", "uint", "string", "large_string"))]
    label = structure.first_of(structure.TARGETS, numbers)
    if image is None or label is None:
        raise ValueError(
            f"{path} has the columns {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}; expected one of "
            f"pictures ({', '.join(structure.INPUTS[:3])}) and one of classes ({', '.join(structure.TARGETS[:3])})"
        )
    described = about.get(label) if isinstance(about, dict) else None
    return Columns(image, label, len(described.get("names") or ()) if isinstance(described, dict) else 0)


def _labels(shard: Path, column: str) -> np.ndarray:
    file = _opened(shard)
    refuse_oversized(str(shard), "rows", file.metadata.num_rows, shard.stat().st_size, unit="rows or bytes")
    if column not in file.schema_arrow.names:
        raise ValueError(f"{shard} has no column {column!r}, which the other shards have; download it again")
    values = file.read(columns=[column]).column(0).to_numpy()
    if values.dtype.kind in "iu":
        return np.asarray(values.astype(np.int64))
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        return np.asarray(values.astype(np.str_))
    raise ValueError(f"{shard}: the column {column!r} has missing values; every image needs its class")


def _numbered(labels: np.ndarray, shards: Sequence[Path], columns: Columns) -> tuple[np.ndarray, int]:
    """Class numbers and the number of classes; words are numbered in alphabetical order, over all splits."""
    if columns.classes and labels.dtype.kind == "i":
        return labels, max(columns.classes, int(labels.max(initial=-1)) + 1)
    every = np.concatenate([_labels(shard, columns.label) for shard in shards])
    if labels.dtype.kind == "i":
        return labels, int(every.max(initial=-1)) + 1
    words = np.unique(every)
    return np.searchsorted(words, labels), len(words)


def _pictures(shards: Sequence[Path], columns: Columns, rows: np.ndarray) -> Iterator[decoding.Picture]:
    """The pictures of the selected rows, one row group in memory at a time."""
    order = np.argsort(rows)
    ordered, start = rows[order], 0
    for shard in shards:
        file, first = _opened(shard), start
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = np.searchsorted(ordered, [start, start + count])
            if low < high:
                parts = (file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns))
                size = sum(part.total_uncompressed_size for part in parts)
                refuse_oversized(str(shard), "pictures", size, shard.stat().st_size, expansion=PACKED, slack=SLACK)
                values = file.read_row_group(group, columns=[columns.image]).column(0).take(ordered[low:high] - start)
                for place, row, value in zip(order[low:high], ordered[low:high], values, strict=True):
                    name = f"{shard} row {row - first}"
                    yield decoding.Picture(int(place), _encoded(value.as_py(), shard, name), name)
            start += count


def _encoded(value: Any, shard: Path, name: str) -> bytes | str:
    content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if content:
        return bytes(content)
    if path:
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise ValueError(f"{name} is at {path!r}, outside the folder of {shard}; refused")
        if not (shard.parent / path).is_file():
            raise ValueError(f"{name}: there is no file {shard.parent / path}; repair or remove it")
        return str(shard.parent / path)
    raise ValueError(f"{name} holds no picture; repair or remove it")

"""Kinds of weight files, told by their bytes, and archives checked before anything in them is believed."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

Kind = Literal["zip", "legacy", "script", "export", "safetensors"]
# files that hold the weights of a Hugging Face folder, the safe ones first
IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
INDEX = ".index.json"
MAX_TEXT = 64 * 2**20  # bytes of a config, an index or a header: none of a real model comes near
HEADER = 8  # bytes of the length before a safetensors header
EXPANSION = 16  # of the compressed code in TorchScript: text


@dataclass(frozen=True)
class Member:
    """One file of an archive.

    Args:
        name: below the archive's own folder.
        size: in bytes, uncompressed.
    """

    name: str
    size: int


def unreadable(path: Path, reason: str) -> ValueError:
    """The error of a file that is no checkpoint, in one line."""
    short = " ".join(reason.split())[:160]
    return ValueError(
        f"{path} is not a readable checkpoint ({short}); expected a file written by torch.save or safetensors"
    )


def kind_of(path: Path) -> Kind:
    """What wrote a file.

    Raises:
        ValueError: it is an archive of another kind, or one that declares what it cannot hold.
    """
    with path.open("rb") as stream:
        start = stream.read(HEADER + 1)
    if start.startswith(b"\x89HDF"):
        raise unreadable(path, "it is an HDF5 file: a results file, or weights of another framework")
    if path.suffix == ".safetensors" or _starts_like_safetensors(start, path.stat().st_size):
        return "safetensors"
    if not start.startswith(b"PK"):
        return "legacy"
    names = [member.name for member in members(path)]
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        return "script"
    if "serialized_exported_program.json" in names or any(
        name.startswith("models/") and name.endswith(".json") for name in names
    ):
        return "export"
    if "data.pkl" not in names:
        raise unreadable(path, "a zip archive without data.pkl, or cut short")
    return "zip"


def members(path: Path) -> list[Member]:
    """The files of an archive written by torch, without its own folder's name.

    Raises:
        ValueError: it is damaged, has names that lead out of it, or declares more than it can hold.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        raise unreadable(path, f"{error}, or cut short") from None
    outside = [info.filename for info in listed if _leads_out(info.filename)]
    if outside:
        raise unreadable(path, f"it holds the name {outside[0]!r}, which leads out of it")
    room = path.stat().st_size
    packed = sum(info.file_size for info in listed if info.compress_type != zipfile.ZIP_STORED)
    plain = sum(info.file_size for info in listed if info.compress_type == zipfile.ZIP_STORED)
    if plain > room or packed > EXPANSION * room + MAX_TEXT // 4:
        raise unreadable(path, f"it declares {plain + packed:,} bytes of content in a file of {room:,} bytes")
    compressed = [info.filename for info in listed if info.compress_type != zipfile.ZIP_STORED]
    if compressed and not any("/code/" in f"/{name}" for name in compressed):
        raise unreadable(path, f"{compressed[0]!r} in it is compressed, as torch.save leaves nothing; unpack it first")
    return [Member(info.filename.partition("/")[2], info.file_size) for info in listed]


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape, data_offsets; and `__metadata__`.

    Raises:
        ValueError: it is damaged, or declares what the file cannot hold.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER), "little")
        if size < HEADER or length > min(size - HEADER, MAX_TEXT):
            raise _damaged(path, f"a header of {length:,} bytes in a file of {size:,} bytes")
        raw = stream.read(length)
    try:
        found = json.loads(raw)
        entries = {name: entry for name, entry in found.items() if name != "__metadata__"}
        last = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        shaped = all(isinstance(entry["shape"], list) for entry in entries.values())
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from None
    if not shaped or last != size - HEADER - length:
        raise _damaged(path, f"tensors of {last:,} bytes in a file with {size - HEADER - length:,} bytes of them")
    return dict(found)


def files_of(path: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint: itself, or the shards that a folder or an index names.

    Raises:
        FileNotFoundError: a shard is not there.
        ValueError: the folder holds no weights, or its index is damaged or leads out of it.
    """
    if path.is_dir():
        inside = next((path / name for name in IN_FOLDER if (path / name).is_file()), None)
        if inside is None:
            raise ValueError(
                f"{path} is a folder, expected a checkpoint file such as {path / 'final.pt'}, "
                f"or a folder with {' or '.join(IN_FOLDER[::2])}"
            )
        return files_of(inside)
    if not path.name.endswith(INDEX):
        return [path]
    table = json_of(path).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ValueError(f"{path} is no index of shards: expected a weight_map of names to files; get it anew")
    names = sorted(set(table.values()))
    for name in names:
        if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name or "\\" in name:
            raise ValueError(f"{path} names the shard {name!r}, which is no file beside it; refused")
        if not (path.parent / name).is_file():
            raise FileNotFoundError(
                f"{path} names the shard {name}, which is not there; expected all {len(names)} of them beside the index"
            )
    return [path.parent / name for name in names]


def sha256_of(path: Path) -> str:
    """SHA-256 of a checkpoint's bytes; of several files, over their names and digests."""
    files = files_of(path)
    if len(files) == 1:
        return file_sha256(files[0])
    return hashlib.sha256("".join(f"{file.name}:{file_sha256(file)};" for file in files).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def holds_weights(folder: Path) -> bool:
    """Whether a folder is a checkpoint as Hugging Face libraries write them: a config beside weights."""
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in IN_FOLDER)


def json_of(path: Path) -> dict[str, Any]:
    """A small JSON file.

    Raises:
        ValueError: it is absurdly large, damaged, or no object.
    """
    if path.stat().st_size > MAX_TEXT:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, expected a short JSON file; get it anew")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no readable JSON ({error}); get it anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected a JSON object; get it anew")
    return found


def _starts_like_safetensors(start: bytes, size: int) -> bool:
    length = int.from_bytes(start[:HEADER], "little")
    return start[HEADER:] == b"{" and 2 <= length <= size - HEADER


def _leads_out(name: str) -> bool:
    parts: Sequence[str] = PurePosixPath(name).parts
    return ".." in parts or name.startswith("/") or "\\" in name or "\0" in name


def _damaged(path: Path, reason: str) -> ValueError:
    short = " ".join(reason.split())[:160]
    return ValueError(f"{path} is not a readable safetensors file ({short}); it may be truncated")

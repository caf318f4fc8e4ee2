"""Read and check the raw content of checkpoint files: archives, safetensors headers, shards and JSON."""

import hashlib
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from landscape.options import printable
from landscape.results.declared_size import EXPANSION, SLACK, refuse_oversized, refuse_special

# files with the weights in a Hugging Face folder, the safe ones first
IN_FOLDER = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# an adapter of peft: what it changes in a model, and how
ADAPTER, ADAPTER_CONFIG = ("adapter_model.safetensors", "adapter_model.bin"), "adapter_config.json"
INDEX = ".index.json"
SHARD = re.compile(r"-\d+-of-\d+\.")
MAX_TEXT = 64 * 2**20  # bytes of a config, an index or a header, far more than those of real models
# What zipfile raises on damaged bytes.
DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError, OverflowError)
CHUNK = 2**20  # bytes read at once
HEADER = 8  # bytes of the length in front of a safetensors header


def unreadable(path: Path, reason: str) -> ValueError:
    """The one-line error for a file that is not a checkpoint."""
    short = printable(" ".join(reason.split())[:160])
    return ValueError(
        f"{path} is not a readable checkpoint ({short}); expected a file written by torch.save or safetensors"
    )


def members(path: Path) -> dict[str, int]:
    """The files in a zip archive written by torch: path below its top folder -> uncompressed size in bytes.

    Raises:
        ValueError: it is damaged, has names that lead out of it, or declares more than it can hold.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
    except DAMAGED_ZIP as error:
        raise unreadable(path, f"{error}, or truncated") from None
    outside = [info.filename for info in listed if _leads_out(info.filename)]
    if outside:
        raise unreadable(path, f"it holds the name {outside[0]!r}, which leads out of it")
    room = path.stat().st_size
    packed = sum(info.file_size for info in listed if info.compress_type != zipfile.ZIP_STORED)
    plain = sum(info.file_size for info in listed if info.compress_type == zipfile.ZIP_STORED)
    try:
        refuse_oversized("it", "content", plain, room)
        refuse_oversized("it", "compressed content", packed, room, expansion=EXPANSION, slack=MAX_TEXT // 4)
    except ValueError as error:
        raise unreadable(path, str(error)) from None
    compressed = [info.filename for info in listed if info.compress_type != zipfile.ZIP_STORED]
    if compressed and not any("/code/" in f"/{name}" for name in compressed):
        raise unreadable(path, f"{compressed[0]!r} in it is compressed, which torch.save never does; unpack it first")
    found = {info.filename.partition("/")[2]: info.file_size for info in listed}
    if len({name.casefold() for name in found}) < len(listed):  # torch does not distinguish case
        raise unreadable(path, "it holds two files of one name")
    return found


def content_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """Open a file of an archive. Its check sum is not verified if it is 0, which torch stores on request."""
    if not member.CRC:
        del member.CRC  # zipfile then checks none
    return archive.open(member)


def check_sums(path: Path) -> None:
    """Compare every file in a zip archive with its check sum, which torch.load does not: 0.3 s per GB.

    Raises:
        ValueError: one differs.
    """
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            try:
                with content_of(archive, member) as stream:
                    while stream.read(CHUNK):
                        pass
            except DAMAGED_ZIP as error:
                raise unreadable(path, f"{member.filename!r} in it is damaged: {error}; copy it again") from None


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape, data_offsets; and `__metadata__`.

    Raises:
        ValueError: it is damaged, or declares other sizes than the file has.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER), "little")
        if size < HEADER or length > min(size - HEADER, MAX_TEXT):
            raise damaged_safetensors(path, f"it declares a header of {length:,} bytes in a file of {size:,} bytes")
        raw = stream.read(length)
    try:
        found = json.loads(raw)
        entries = {name: entry for name, entry in found.items() if name != "__metadata__"}
        last = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        shapes = [entry["shape"] for entry in entries.values()]
        shaped = all(isinstance(shape, list) and all(isinstance(n, int) for n in shape) for shape in shapes)
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError, OverflowError) as error:
        raise damaged_safetensors(path, str(error) or type(error).__name__) from None
    if not shaped or last != size - HEADER - length:
        raise damaged_safetensors(path, f"it declares tensors of {last:,} bytes and holds {size - HEADER - length:,}")
    return dict(found)


def files_of(path: Path) -> dict[Path, int]:
    """The files with the weights of a checkpoint, and their bytes: itself, or the shards of a folder or an index.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the folder holds no weights, its index is damaged or leads out of it, or a file is a pipe.
    """
    if path.is_dir():
        inside = next((path / name for name in (*IN_FOLDER, *ADAPTER) if (path / name).is_file()), None)
        if inside is None:
            raise ValueError(
                f"{path} is a folder, expected a checkpoint file such as {path / 'final.pt'}, "
                f"or a folder with {' or '.join(IN_FOLDER[::2])}"
            )
        return files_of(inside)
    if not path.name.endswith(INDEX):
        for index in (path.with_name(name) for name in IN_FOLDER if name.endswith(INDEX)):
            if SHARD.search(path.name) and index.is_file():
                raise ValueError(f"{path} is a part of the weights, of which {index} names all; give that one")
        return {path: _size(path)}
    table = json_of(path).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ValueError(
            f"{path} is not an index of shards: expected a weight_map of names to files; download it again"
        )
    names = sorted(set(table.values()))
    for name in names:
        if not name or name != os.path.basename(name) or name in (".", "..") or "\0" in name or "\\" in name:
            raise ValueError(f"{path} names the shard {name!r}, which is not a file in the same folder; refused")
        if not (path.parent / name).is_file():
            raise FileNotFoundError(
                f"{path} names the shard {name}, which is missing; expected all {len(names)} shards beside the index"
            )
    return {path.parent / name: _size(path.parent / name) for name in names}


def _size(path: Path) -> int:
    """The bytes of a file. Raises ValueError: it is a pipe or a device, on which reading may wait for ever."""
    refuse_special(path)
    return path.stat().st_size


def refuse_expanding(path: Path, what: str, declared: int, held: int, slack: int = SLACK) -> None:
    """Refuse a checkpoint that declares far more bytes than its files hold. Raises ValueError: it does."""
    refuse_oversized(str(path), what, declared, held, expansion=EXPANSION, slack=slack)


def sha256_of(path: Path) -> str:
    """SHA-256 of a checkpoint's bytes; for several files, of their names and digests."""
    files = files_of(path)
    if len(files) == 1:
        return file_sha256(*files)
    return hashlib.sha256("".join(f"{file.name}:{file_sha256(file)};" for file in files).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def holds_weights(folder: Path) -> bool:
    """Whether a folder is a checkpoint as Hugging Face libraries write them: a config, an adapter, or shards."""
    index = any((folder / name).is_file() for name in IN_FOLDER if name.endswith(INDEX))
    return index or holds_model(folder) or holds_adapter(folder)


def holds_model(folder: Path) -> bool:
    """Whether a folder holds the configuration and all weights of a model."""
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in IN_FOLDER)


def holds_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft, and no whole model."""
    adapter = (folder / ADAPTER_CONFIG).is_file() and any((folder / name).is_file() for name in ADAPTER)
    return adapter and not any((folder / name).is_file() for name in IN_FOLDER)


def json_of(path: Path) -> dict[str, Any]:
    """The object in a small JSON file. Raises ValueError: it is far too large, damaged, or not an object."""
    if (size := _size(path)) > MAX_TEXT:
        raise ValueError(f"{path} has {size:,} bytes, expected a short JSON file; download it again")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected a JSON object; download it again")
    return found


def _leads_out(name: str) -> bool:
    parts: Sequence[str] = PurePosixPath(name).parts
    return ".." in parts or name.startswith("/") or "\\" in name or "\0" in name


def damaged_safetensors(path: Path, reason: str) -> ValueError:
    """The error of a safetensors file that cannot be read, to be raised."""
    short = printable(" ".join(reason.split())[:160])
    return ValueError(f"{path} is not a readable safetensors file ({short}); it may be truncated")

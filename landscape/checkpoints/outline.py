"""What a checkpoint holds, with shapes in place of tensors: nothing is loaded, run or imported, torch neither."""

from __future__ import annotations

import argparse
import collections
import io
import math
import pathlib
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from landscape.checkpoints import restricted_unpickler
from landscape.checkpoints.file_formats import files_of, header, kind_of, members, unreadable

MAGIC = 0x1950A86A20F9469CFC6C  # of torch's format before it was a zip archive
ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexDouble": 16, "ComplexFloat": 8, "QUInt8": 1, "QInt8": 1, "QInt32": 4, "Untyped": 1,
}  # fmt: skip
# What torch itself rebuilds without running anything of the file's: tensors, storages, and words for kinds of numbers.
OF_TORCH = re.compile(
    r"torch\.(_utils\._rebuild_\w+|_tensor\._rebuild_from_type_v2|(storage\.)?\w*Storage|\w*Tensor|Size|device|Generator"
    r"|nn\.parameter\.(Parameter|Buffer|Uninitialized\w+)|serialization\._get_layout|bool|strided|sparse_\w+"
    r"|(u?int|qu?int|b?float|complex)\d+(_e\w+|x\d)?|\w+_format|channels_last(_3d)?|per_(tensor|channel)_affine)"
)
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+")  # damaged pickles name anything
Names = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of which only this much is known."""

    shape: tuple[int, ...]
    dtype: str

    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Outline:
    """The content of a file and what its pickle names beyond plain data."""

    content: Any
    wanted: Names = ()


# Globals that real checkpoints name beside tensors, and what stands for them: nothing that does anything when called.
HARMLESS: Mapping[str, Callable[..., Any]] = {
    **restricted_unpickler.NUMPY,
    **{f"pathlib.{part}{name}": pathlib.PurePosixPath for part in ("", "_local.")
       for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    "_codecs.encode": lambda word, *_: word.encode("latin1"),  # bytes, as protocol 2 spells them
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.defaultdict": lambda *_: {},
    **{f"{place}.{kind.__name__}": kind for place in ("builtins", "__builtin__") for kind in (list, dict, set)},
}  # fmt: skip


def refusal(path: Path, wanted: Names) -> ValueError:
    """The error of a file that would run code."""
    return ValueError(
        f"{path} would run code to load ({', '.join(wanted[:4])}); refused. If the file is your own, save its "
        "state_dict() alone, or give --trust-pickle"
    )


def outline(path: Path) -> Outline:
    """The content of a checkpoint, whatever of its forms it has.

    Raises:
        FileNotFoundError, ValueError: a part is not there or damaged, or declares what it cannot hold.
    """
    files = files_of(path)
    if len(files) == 1:
        return _of_file(files[0])
    parts = [_of_file(file) for file in files]
    content = {
        name: entry for part in parts if isinstance(part.content, Mapping) for name, entry in part.content.items()
    }
    return Outline(content, tuple(name for part in parts for name in part.wanted))


def _of_file(path: Path) -> Outline:
    kind = kind_of(path)
    if kind == "safetensors":
        entries = {name: entry for name, entry in header(path).items() if name != "__metadata__"}
        return Outline({name: Entry(tuple(e["shape"]), str(e["dtype"]).lower()) for name, e in entries.items()})
    return {"zip": _of_zip, "script": _of_zip, "legacy": _of_pickles, "export": _of_export}[kind](path)


def _of_zip(path: Path) -> Outline:
    sizes = {member.name: member.size for member in members(path)}

    def storage(pid: Any) -> _Storage:
        found = _Storage.of(pid)
        if sizes.get(f"data/{found.key}") != found.bytes:
            raise ValueError(
                f"tensor {found.key} declares {found.bytes:,} bytes, {sizes.get(f'data/{found.key}')} are there"
            )
        return found

    try:
        with zipfile.ZipFile(path) as archive:
            name = next(info.filename for info in archive.infolist() if info.filename.partition("/")[2] == "data.pkl")
            raw = archive.read(name)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise unreadable(path, str(error) or type(error).__name__) from None
    return _read(path, io.BytesIO(raw), storage)


def _of_pickles(path: Path) -> Outline:
    """Of a file before zip archives: magic number, version, system, content; else of a plain pickle, its names."""
    room = path.stat().st_size

    def storage(pid: Any) -> _Storage:
        found = _Storage.of(pid)
        if found.bytes > room:
            raise ValueError(f"tensor {found.key} declares {found.bytes:,} bytes in a file of {room:,} bytes")
        return found

    with path.open("rb") as stream:
        try:
            first = _read(path, stream, storage)
        except ValueError:  # no pickle at all
            first = Outline(None)
        if first.content != MAGIC:
            if first.wanted:
                return Outline(None, first.wanted)
            raise unreadable(path, "neither an archive nor a pickle of tensors, or cut short")
        for _ in range(2):
            _read(path, stream, storage)
        return _read(path, stream, storage)


def _of_export(path: Path) -> Outline:
    members(path)
    return Outline(None)


def _read(path: Path, stream: Any, storage: Callable[[Any], Any]) -> Outline:
    unpickler = restricted_unpickler.Unpickler(stream, {**HARMLESS, **TENSORS}, storage, encoding="utf-8")
    try:
        content = unpickler.load()
    except MemoryError:
        raise unreadable(path, "its pickle asks for more memory than there is") from None
    except Exception as error:  # a damaged pickle raises almost anything
        if wanted := _wanted(unpickler.named):
            return Outline(None, wanted)
        raise unreadable(path, str(error) or type(error).__name__) from None
    return Outline(content, _wanted(unpickler.named))


def _wanted(names: Mapping[str, None]) -> Names:
    known = HARMLESS.keys() | TENSORS.keys()
    return tuple(n for n in names if NAME.fullmatch(n) and n not in known and not OF_TORCH.fullmatch(n))


@dataclass(frozen=True)
class _Storage:
    """Numbers in a row that tensors are cut from."""

    key: str
    kind: str
    numel: int

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES.get(self.kind, 1)

    @classmethod
    def of(cls, pid: Any) -> _Storage:
        """From the description in a pickle: ("storage", kind, key, location, numel, ...)."""
        word, kind, key, _, numel = pid[:5]
        if restricted_unpickler.text(word) != "storage" or not isinstance(numel, int) or numel < 0:
            raise ValueError("a reference to something that is no storage")
        name = str(getattr(kind, "named", "")).rpartition(".")[2]
        return cls(restricted_unpickler.text(key), name.removesuffix("Storage"), numel)


DTYPES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> Entry:
    kind = getattr(storage, "kind", "")
    dtype = next(
        (
            r.named.rpartition(".")[2]
            for r in rest[2:3]
            if isinstance(r, type) and issubclass(r, restricted_unpickler.Inert)
        ),
        DTYPES.get(kind, kind.lower()),
    )
    shape = tuple(size)
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"a tensor of shape {shape}")
    return Entry(shape, dtype)


def _parameter(data: Any = None, *_: Any) -> Any:
    return data


def _typed(function: Callable[..., Any], _kind: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
    return function(*arguments)


TENSORS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": tuple,
}

"""Read outlines of checkpoint files: content with shapes in place of tensors. Nothing is loaded, run or imported."""

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

from landscape.checkpoints import raw_files, restricted_unpickler
from landscape.checkpoints.restricted_unpickler import BoundError
from landscape.options import printable
from landscape.results.declared_size import refuse_oversized

MAGIC = 0x1950A86A20F9469CFC6C  # of torch's format before 1.6
ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexDouble": 16, "ComplexFloat": 8, "QUInt8": 1, "QInt8": 1, "QInt32": 4, "Untyped": 1,
}  # fmt: skip
# What torch rebuilds without running code of the file: tensors, storages, and names of dtypes and layouts.
OF_TORCH = re.compile(
    r"torch\.(_utils\._rebuild_\w+|_tensor\._rebuild_from_type_v2|(storage\.|cuda\.)?\w*Storage|Size|device|Generator"
    r"|(cuda\.)?(sparse\.)?\w*Tensor|bits\d+(x\d)?|per_(tensor|channel)_\w+"
    r"|nn\.parameter\.(Parameter|Buffer|Uninitialized\w+)|serialization\._get_layout|bool|strided|sparse_\w+"
    r"|(u?int|qu?int|b?float|complex)\d+(_e\w+|x\d)?|\w+_format|channels_last(_3d)?)"
)
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+")  # a damaged pickle may name anything
LONGEST_NAME = 4096  # of a storage, in characters
MOST_NUMBERS = 2**63  # along an axis of a tensor
Names = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Outline:
    """The outline of a file."""

    content: Any  # as `torch.load` would return it, with an `Entry` for each tensor; None if it cannot be read safely
    wanted: Names = ()  # globals that its pickle names beyond tensors and plain data


# Globals that checkpoints commonly name beside tensors, and their stand-ins, which do nothing when called.
HARMLESS: Mapping[str, Callable[..., Any]] = {
    **restricted_unpickler.NUMPY,
    **{f"pathlib.{part}{name}": pathlib.PurePosixPath for part in ("", "_local.")
       for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")},
    "_codecs.encode": lambda word, *_: word.encode("latin1"),  # bytes in pickle protocol 2
    "argparse.Namespace": argparse.Namespace,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter,
    "collections.defaultdict": lambda *_: {},
    **{f"{place}.bytearray": lambda *words: _bytes(*words) for place in ("builtins", "__builtin__")},
    **{f"{place}.complex": complex for place in ("builtins", "__builtin__")},
    **{f"{place}.{kind.__name__}": kind for place in ("builtins", "__builtin__") for kind in (list, dict, set)},
}  # fmt: skip


def refusal(path: Path, wanted: Names) -> ValueError:
    """The error of a file that would run code when loaded."""
    return ValueError(
        f"{path} would run code to load ({printable(', '.join(wanted[:4]))}); refused. If the file is your own, save "
        "its state_dict() alone, or give --trust-pickle"
    )


def of_safetensors(path: Path) -> Outline:
    """The outline of a safetensors file, from its header. Raises ValueError: it is damaged."""
    entries = {name: entry for name, entry in raw_files.header(path).items() if name != "__metadata__"}
    return Outline({name: Entry(tuple(e["shape"]), str(e["dtype"]).lower()) for name, e in entries.items()})


def of_zip(path: Path) -> Outline:
    """The outline of a zip archive of torch.save.

    Raises:
        ValueError: it is damaged, or declares tensors of other sizes than it holds.
    """
    sizes = raw_files.members(path)

    def storage(pid: Any) -> _Storage:
        found = _Storage.of(pid)
        if sizes.get(f"data/{found.key}") != found.bytes:
            raise ValueError(
                f"it declares tensor {found.key} of {found.bytes:,} bytes and holds {sizes.get(f'data/{found.key}')}"
            )
        return found

    try:
        with zipfile.ZipFile(path) as archive:
            found = next(info for info in archive.infolist() if info.filename.partition("/")[2] == "data.pkl")
            with raw_files.content_of(archive, found) as stream:
                raw = stream.read()
    except raw_files.DAMAGED_ZIP as error:
        raise raw_files.unreadable(path, str(error) or type(error).__name__) from None
    return _read(path, io.BytesIO(raw), storage)


def of_pickles(path: Path) -> Outline:
    """The outline of a file of torch.save before PyTorch 1.6: magic number, version, system, content.

    For any other pickle, only the globals that it names.

    Raises:
        ValueError: it is neither, is damaged, or declares more than it can hold.
    """
    room = path.stat().st_size

    def storage(pid: Any) -> _Storage:
        found = _Storage.of(pid)
        refuse_oversized("it", f"tensor {found.key}", found.bytes, room)
        return found

    with path.open("rb") as stream:
        try:
            first = _read(path, stream, storage)
        except ValueError:  # not a pickle
            first = Outline(None)
        if first.content != MAGIC:
            if first.wanted:
                return Outline(None, first.wanted)
            raise raw_files.unreadable(path, "neither an archive nor a pickle of tensors, or truncated")
        for _ in range(2):
            _read(path, stream, storage)
        return _read(path, stream, storage)


def of_program(path: Path) -> Outline:
    """An empty outline: the content of a program is known only once it is loaded.

    Raises:
        ValueError: the archive is damaged, or declares more than it can hold.
    """
    raw_files.members(path)
    return Outline(None)


def _read(path: Path, stream: Any, storage: Callable[[Any], Any]) -> Outline:
    unpickler = restricted_unpickler.Unpickler(stream, {**HARMLESS, **TENSORS}, storage, encoding="utf-8")
    try:
        content = unpickler.load()
    except BoundError as error:
        raise raw_files.unreadable(path, str(error)) from None
    except MemoryError:
        raise raw_files.unreadable(path, "its pickle needs more memory than there is") from None
    except Exception as error:  # a damaged pickle raises almost anything
        if wanted := _wanted(unpickler.named):
            return Outline(None, wanted)
        raise raw_files.unreadable(path, str(error) or type(error).__name__) from None
    return Outline(content, _wanted(unpickler.named))


def _wanted(names: Mapping[str, None]) -> Names:
    known = HARMLESS.keys() | TENSORS.keys()
    return tuple(n for n in names if NAME.fullmatch(n) and n not in known and not OF_TORCH.fullmatch(n))


@dataclass(frozen=True)
class _Storage:
    """The flat storage that a tensor is a view of."""

    key: str
    kind: str
    numel: int

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES.get(self.kind, 1)

    @classmethod
    def of(cls, pid: Any) -> "_Storage":
        """The storage that a persistent id describes: ("storage", kind, key, location, numel, ...)."""
        word, kind, key, _, numel = pid[:5]
        if restricted_unpickler.text(word) != "storage" or not isinstance(numel, int) or numel < 0:
            raise ValueError("a reference to something other than a storage")
        name, key = str(getattr(kind, "named", "")).rpartition(".")[2], restricted_unpickler.text(key)
        if not isinstance(key, str) or len(key) > LONGEST_NAME or numel > MOST_NUMBERS:
            raise ValueError("a storage without a name or of no size")
        return cls(key, name.removesuffix("Storage"), numel)


DTYPES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip


def _tensor(storage: _Storage, offset: int, size: Any, stride: Any, *rest: Any) -> Entry:
    kind = getattr(storage, "kind", "")
    named = [r.named for r in rest[2:3] if isinstance(r, type) and issubclass(r, restricted_unpickler.Inert)]
    dtype = named[0].rpartition(".")[2] if named else DTYPES.get(kind, kind.lower())
    if not isinstance(size, tuple | list) or len(size) > restricted_unpickler.DIMENSIONS:
        raise ValueError("a tensor without a shape")
    shape = tuple(size)
    if not all(isinstance(n, int) and 0 <= n < MOST_NUMBERS for n in shape):
        raise ValueError("a tensor whose shape is not of whole numbers")
    return Entry(shape, dtype)


def _bytes(word: bytes | str = b"", *_: object) -> bytes:
    """The bytes that are in the pickle, not as many zeros as a number in it says."""
    if isinstance(word, bytes | str):
        return word if isinstance(word, bytes) else word.encode("latin1")
    raise ValueError(f"bytes of a {type(word).__name__}")


def _rebuilt(function: Any, _kind: Any, arguments: Any, *_: object) -> Any:
    if function in (dict, set, collections.OrderedDict, collections.Counter):
        raise ValueError("a tensor that is a container")
    return function(*arguments)


TENSORS: Mapping[str, Callable[..., Any]] = {
    **{f"torch._utils._rebuild_tensor{version}": _tensor for version in ("", "_v2", "_v3")},
    **{f"torch._utils._rebuild_parameter{kind}": lambda data=None, *_: data for kind in ("", "_with_state")},
    "torch._tensor._rebuild_from_type_v2": _rebuilt,
    "torch.Size": tuple,
}

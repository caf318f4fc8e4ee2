"""Detect the format of a checkpoint file, and read its outline (shapes in place of tensors) or its content.

Torch is imported only by the functions that load tensors: `landscape show` reads outlines without it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from landscape.checkpoints import outline, safe_load
from landscape.checkpoints.outline import Outline
from landscape.checkpoints.raw_files import HEADER, files_of, members, unreadable
from landscape.options import naming


@dataclass(frozen=True)
class Evidence:
    """What a format is detected by."""

    path: Path
    start: bytes  # its first bytes

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files in a zip archive.

        Raises:
            ValueError: it is damaged, or declares more than it can hold.
        """
        return frozenset(members(self.path))

    def holds(self, pattern: str) -> bool:
        """Whether an archive has a file of such a name."""
        return any(re.fullmatch(pattern, name, re.DOTALL) for name in self.names)


@dataclass(frozen=True)
class FileFormat:
    """One format of checkpoint files."""

    name: str  # for messages
    detect: Callable[[Evidence], bool]  # whether a file has this format, if it has none before it in `FORMATS`
    outline: Callable[[Path], Outline]  # reads its content with shapes in place of tensors
    load: Callable[[Path, bool], Any]  # reads its tensors; takes whether the user trusts the file to run code
    program: bool = False  # the model's code is in the file, and loading it runs that code


def _is_safetensors(file: Evidence) -> bool:
    length = int.from_bytes(file.start[:HEADER], "little")
    starts = file.start[HEADER:] == b"{" and 2 <= length <= file.path.stat().st_size - HEADER
    return file.path.suffix == ".safetensors" or starts


def _program(name: str, member: str) -> FileFormat:
    load = partial(safe_load.program, kind=name)
    return FileFormat(name, lambda file: file.holds(member), outline.of_program, load, program=True)


FORMATS = (  # in the order in which they are tried
    FileFormat("safetensors", _is_safetensors, outline.of_safetensors, safe_load.safetensors),
    FileFormat(  # of torch before its archives
        "pickle",
        lambda file: not file.start.startswith(b"PK"),
        outline.of_pickles,
        partial(safe_load.pickled, outline=outline.of_pickles),
    ),
    _program("TorchScript", r"constants\.pkl|code/.*"),
    _program("torch.export", r"serialized_exported_program\.json|models/.*\.json"),
    FileFormat("zip", lambda file: "data.pkl" in file.names, outline.of_zip, safe_load.archived),
)


def format_of(path: Path) -> FileFormat:
    """The format of a file, by its bytes.

    Raises:
        ValueError: it is an archive of another format, or one that declares more than it can hold.
    """
    with path.open("rb") as stream:
        start = stream.read(HEADER + 1)
    if start.startswith(b"\x89HDF"):
        raise unreadable(path, "it is an HDF5 file: a results file, or weights of another framework")
    if path.suffix == ".t7" and not start.startswith((b"PK", b"\x80")):
        raise unreadable(path, "a .t7 that torch.save did not write, as Lua Torch does; convert it, e.g. by torchfile")
    evidence = Evidence(path, start)
    kind = next((kind for kind in FORMATS if kind.detect(evidence)), None)
    if kind is None:
        raise unreadable(path, "a zip archive without data.pkl, or truncated")
    return kind


@naming
def outline_of(path: Path) -> Outline:
    """The content of a checkpoint with shapes in place of tensors: a file, an index of shards, or a folder.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or declares more than it can hold.
    """
    files = files_of(path)
    if len(files) == 1:
        return format_of(files[0]).outline(files[0])
    parts = [format_of(file).outline(file) for file in files]
    content = {
        name: entry for part in parts if isinstance(part.content, Mapping) for name, entry in part.content.items()
    }
    return Outline(content, tuple(name for part in parts for name in part.wanted))


@naming
def load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Tensors and plain data of a checkpoint (as for `outline_of`), on the CPU, or a `Program`.

    No code from the file runs, unless `trust_pickle`, which unpickles arbitrary objects and loads programs.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the file has another format, is damaged, or would run code; names what it would call.
    """
    files = files_of(path)
    if len(files) == 1:
        return format_of(files[0]).load(files[0], trust_pickle)
    content: dict[str, Any] = {}
    for file in files:
        part = format_of(file).load(file, trust_pickle)
        if not isinstance(part, dict) or content.keys() & part.keys():
            raise ValueError(
                f"{file} is not a shard: expected a dict of tensors that no other shard holds; download it again"
            )
        content |= part
    return content

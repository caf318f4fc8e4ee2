"""Detect the format of a checkpoint file, and read its outline (shapes in place of tensors) or its content.

No code from the file runs, unless the user trusts it.
Torch is imported only by the functions that load tensors: `landscape show` reads outlines without it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.checkpoints import outline, raw_files
from landscape.checkpoints.outline import HARMLESS, Outline, of_zip, refusal
from landscape.checkpoints.raw_files import HEADER, check_sums, files_of, header, members, unreadable
from landscape.options import naming

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

_allowing = threading.Lock()  # torch's list of allowed globals is process-wide


@dataclass(frozen=True)
class Program:
    """A model whose code is in the file."""

    module: nn.Module
    batch_size: int = 0  # the one it was exported for; 0 for any


def safetensors(path: Path, trust_pickle: bool) -> dict[str, Tensor]:
    """Load a safetensors file, which cannot hold code. Raises ValueError: it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    header(path)  # checks the declared sizes before memory is reserved
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise raw_files.damaged_safetensors(path, str(error)) from None


def program(path: Path, trust_pickle: bool, *, kind: str) -> Program:
    """Load a program that the user trusts.

    The operations of TorchScript include torch.save and torch.from_file; the reader of torch.export evaluates the sizes
    in the graph as Python.

    Raises:
        ValueError: the user does not trust it, or it is damaged.
    """
    import torch

    if not trust_pickle:
        raise ValueError(
            f"{path} is a {kind} program, and running it may read and write files; refused. If the file is "
            "your own, give --trust-pickle; otherwise save the state_dict() of its model and name that with --model"
        )
    check_sums(path)
    try:
        if kind == "TorchScript":
            return Program(torch.jit.load(path, map_location="cpu"))  # type: ignore[no-untyped-call]
        exported = torch.export.load(path)
        module = exported.module()
    except Exception as error:  # the readers raise almost anything
        raise unreadable(path, f"{kind}: {error}") from None
    for name in ("train", "eval"):  # the mode is fixed in the graph, and setting one raises
        module.__dict__.pop(name, None)
    return Program(module, _fixed_batch_size(exported))


def _fixed_batch_size(program: ExportedProgram) -> int:
    """The batch size that an exported graph is specialised to, 0 for any."""
    from torch import Tensor

    inputs = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in inputs and isinstance(value, Tensor) and value.dim():
            return value.shape[0] if isinstance(value.shape[0], int) else 0
    return 0


def archived(path: Path, trust_pickle: bool) -> Any:
    """Load a zip archive of torch.save, as `pickled`, once its check sums are right."""
    check_sums(path)
    return pickled(path, trust_pickle, outline=of_zip)


def pickled(path: Path, trust_pickle: bool, *, outline: Callable[[Path], Outline]) -> Any:
    """Load a file of torch.save: tensors and plain data alone, or whatever it holds if the user trusts it.

    `outline` reads its outline, which also checks the declared sizes.

    Raises:
        ValueError: it is damaged, or would run code; names what it would call.
    """
    import torch

    if trust_pickle:
        return _trusted(path)
    known = outline(path)
    wanted = known.wanted
    if known.content is None and wanted:  # what is behind the first of these names was not looked at
        raise refusal(path, wanted)
    try:
        with _allowing, torch.serialization.safe_globals([(stand_in, name) for name, stand_in in HARMLESS.items()]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error).strip()
        refused = re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", text)
        wanted = wanted or ((refused[1],) if refused else ())
        if wanted:
            raise refusal(path, wanted) from None
        reason = re.search(r"WeightsUnpickler error:\s*(.+)", text) or re.match(r"(.+)", text)  # after torch's advice
        raise unreadable(path, reason[1] if reason else type(error).__name__) from None


def _trusted(path: Path) -> Any:
    import torch

    from landscape.checkpoints.user_code import on_path

    try:
        with on_path(Path.cwd()):  # the class of a pickled module is often defined there
            return torch.load(path, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} needs the code of its model, and there is {str(error)[0].lower()}{str(error)[1:]}; run in the "
            "folder that has it, or save the state_dict() of the model and name that with --model"
        ) from None
    except Exception as error:  # a truncated file is an OSError, or whatever its reader raises
        lacking = re.search(r"Can't get attribute '([\w.]+)' on <module '([\w.]+)'", str(error))
        if lacking is None:
            raise unreadable(path, str(error) or type(error).__name__) from None
        name, module = lacking.groups()
        where = "the script that saved it" if module == "__main__" else f"the module {module}, which has none here"
        raise ValueError(
            f"{path} needs the class {name} of {where}; save the state_dict() of the model there, and name the class "
            f"with --model file.py:{name}"
        ) from None


@dataclass(frozen=True)
class Evidence:
    """What a format is detected by."""

    path: Path
    start: bytes  # its first bytes

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files in a zip archive. Raises ValueError: it is damaged, or declares more than it can hold."""
        return frozenset(members(self.path))

    def holds(self, pattern: str) -> bool:
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
    load = partial(program, kind=name)
    return FileFormat(name, lambda file: file.holds(member), outline.of_program, load, program=True)


FORMATS = (  # in the order in which they are tried
    FileFormat("safetensors", _is_safetensors, outline.of_safetensors, safetensors),
    FileFormat(  # of torch before its archives
        "pickle",
        lambda file: not file.start.startswith(b"PK"),
        outline.of_pickles,
        partial(pickled, outline=outline.of_pickles),
    ),
    _program("TorchScript", r"constants\.pkl|code/.*"),
    _program("torch.export", r"serialized_exported_program\.json|models/.*\.json"),
    FileFormat("zip", lambda file: "data.pkl" in file.names, outline.of_zip, archived),
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
    first, *more = files = files_of(path)
    if not more:
        return format_of(first).outline(first)
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
    first, *more = files = files_of(path)
    if not more:
        return format_of(first).load(first, trust_pickle)
    content: dict[str, Any] = {}
    for file in files:
        part = format_of(file).load(file, trust_pickle)
        if not isinstance(part, dict) or content.keys() & part.keys():
            raise ValueError(
                f"{file} is not a shard: expected a dict of tensors that no other shard holds; download it again"
            )
        content |= part
    return content

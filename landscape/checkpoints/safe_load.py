"""The tensors of a checkpoint, read without running code from it."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints.file_formats import Kind, files_of, header, kind_of, unreadable
from landscape.checkpoints.outline import HARMLESS, outline, refusal
from landscape.checkpoints.user_code import on_path

_allowing = threading.Lock()  # the list of allowed globals belongs to the process
PROGRAMS = {"script": "TorchScript", "export": "torch.export"}


@dataclass(frozen=True)
class Program:
    """A model that a file holds with its code.

    Args:
        module: the model.
        batch_size: the one it was exported for; 0 for any.
    """

    module: nn.Module
    batch_size: int = 0


def safe_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Tensors and plain data of a checkpoint in any of its forms, on the CPU.

    Args:
        path: a file, an index of shards, or a folder of Hugging Face's. Of TorchScript and torch.export, a `Program`.
        trust_pickle: unpickle arbitrary objects and load programs, which runs code from the file.

    Raises:
        FileNotFoundError: a shard is not there.
        ValueError: the file is of another kind, is damaged, or would run code; names what it would call.
    """
    files = files_of(path)
    if len(files) == 1:
        return _of_file(files[0], trust_pickle)
    content: dict[str, Any] = {}
    for file in files:
        part = _of_file(file, trust_pickle)
        if not isinstance(part, dict) or content.keys() & part.keys():
            raise ValueError(f"{file} is no shard: expected a dict of tensors that no other shard holds; get it anew")
        content |= part
    return content


def _of_file(path: Path, trust_pickle: bool) -> Any:
    kind = kind_of(path)
    if kind == "safetensors":
        return _safetensors(path)
    if kind in PROGRAMS:
        return _program(path, kind, trust_pickle)
    return _pickled(path, trust_pickle)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    header(path)  # what it declares, before a byte is reserved for it
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def _program(path: Path, kind: Kind, trust_pickle: bool) -> Program:
    """A TorchScript or exported model.

    Both are programs, and their own operations open and write files as soon as they run: TorchScript has torch.save
    and torch.from_file, and torch.export's reader evaluates the sizes in its graph as Python.
    """
    if not trust_pickle:
        raise ValueError(
            f"{path} is a {PROGRAMS[kind]} program, and running it may read and write files; refused. If the file is "
            "your own, give --trust-pickle; else save the state_dict() of its model and name that with --model"
        )
    try:
        if kind == "script":
            module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
            return Program(module)
        exported = torch.export.load(path)
        module = exported.module()
    except Exception as error:  # readers of programs stumble in many ways
        raise unreadable(path, f"{PROGRAMS[kind]}: {error}") from None
    for name in ("train", "eval"):  # the mode is baked into the graph, and asking for one raises
        module.__dict__.pop(name, None)
    return Program(module, _fixed_batch(exported))


def _fixed_batch(exported: torch.export.ExportedProgram) -> int:
    """The number of samples that an exported graph takes, 0 where it takes any."""
    inputs = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in inputs and isinstance(value, Tensor) and value.dim():
            return value.shape[0] if isinstance(value.shape[0], int) else 0
    return 0


def _pickled(path: Path, trust_pickle: bool) -> Any:
    if trust_pickle:
        try:
            with on_path(Path.cwd()):  # where the class of a pickled module is defined, as often as not
                return torch.load(path, map_location="cpu", weights_only=False)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{path} needs the code of its model, and there is {str(error)[0].lower()}{str(error)[1:]}; run in the "
                "folder that has it, or save the state_dict() of the model and name that with --model"
            ) from None
        except Exception as error:  # a file cut short is an OSError, or whatever its reader stumbles over
            raise unreadable(path, str(error) or type(error).__name__) from None
    wanted = outline(path).wanted  # also refuses what declares more than it holds
    try:
        with _allowing, torch.serialization.safe_globals([(stand_in, name) for name, stand_in in HARMLESS.items()]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error).strip()
        named = re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", text)
        wanted = wanted or ((named[1],) if named else ())
        if wanted:
            raise refusal(path, wanted) from None
        said = re.search(r"WeightsUnpickler error:\s*(.+)", text) or re.match(r"(.+)", text)  # torch gives advice first
        raise unreadable(path, said[1] if said else type(error).__name__) from None

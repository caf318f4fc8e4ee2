"""The content of a checkpoint file, read without running code from it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import pathlib
import pickletools
import re
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPERATIONS = 10_000  # of a pickle, looked at for the names in a refusal
_allowing = threading.Lock()  # the list of allowed globals belongs to the process


def safe_load(path: Path, *, trust_pickle: bool = False) -> Any:
    """Tensors and plain data of a file by torch.save or safetensors, on the CPU.

    Args:
        path: the file; its suffix tells safetensors.
        trust_pickle: unpickle arbitrary objects, which runs code from the file.

    Raises:
        ValueError: the file is of another kind, is damaged, or would run code; names what it would call.
    """
    return _load_safetensors(path) if path.suffix == ".safetensors" else _load_torch(path, trust_pickle)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


def _load_torch(path: Path, trust_pickle: bool) -> Any:
    try:
        if trust_pickle:
            return torch.load(path, map_location="cpu", weights_only=False)
        with _allowing, torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file cut short is an OSError, or whatever its reader stumbles over
        raise ValueError(_why_unreadable(path, error)) from None


def _why_unreadable(path: Path, error: Exception) -> str:
    wanted = []
    if zipfile.is_zipfile(path):
        try:
            with _allowing, torch.serialization.safe_globals(_harmless()):
                wanted = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        except Exception:  # a damaged pickle inside: the message below still holds
            wanted = []
    text = str(error).strip()
    named = re.search(r"nsupported (?:global: )?GLOBAL ([\w.]+)", text)
    if not wanted and named:
        wanted = [named.group(1)]
    if not wanted and "pickle protocol" in text:  # a plain pickle, which torch does not look into
        wanted = _globals_named(path)
    if wanted:
        return (
            f"{path} would run code to load ({', '.join(wanted[:4])}); refused. If the file is your own, save its "
            "state_dict() alone, or give --trust-pickle"
        )
    said = re.search(r"WeightsUnpickler error:\s*(.+)", text) or re.match(r"(.+)", text)  # torch gives advice first
    reason = said.group(1)[:120] if said else type(error).__name__
    if not zipfile.is_zipfile(path):  # torch took it for a pickle and stumbled over some byte
        reason = "neither an archive nor a pickle of tensors, or cut short"
    return f"{path} is not a readable checkpoint ({reason}); expected a file written by torch.save or safetensors"


def _globals_named(path: Path) -> list[str]:
    """Names that a plain pickle would import, read without importing any of them."""
    names: list[str] = []
    words: list[str] = []
    with path.open("rb") as stream, contextlib.suppress(ValueError):
        for operation, argument, _ in itertools.islice(pickletools.genops(stream), OPERATIONS):
            if operation.name in ("GLOBAL", "INST"):
                names.append(str(argument).replace(" ", "."))
            elif operation.name == "STACK_GLOBAL":
                names.append(".".join(words[-2:]))
            elif isinstance(argument, str):
                words.append(argument)
    return names


def _harmless() -> list[Any]:
    """Globals that real checkpoints name and that cannot do anything when called."""
    kinds = [getattr(np.dtypes, name) for name in dir(np.dtypes) if name.endswith("DType")]
    core = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray  # type: ignore[attr-defined]
    rebuilt = [core.scalar, core._reconstruct]
    spelt: list[tuple[Any, str]] = [(f, f"numpy.core.multiarray.{f.__name__}") for f in rebuilt]
    spelt += [(f, f"numpy._core.multiarray.{f.__name__}") for f in rebuilt]
    spelt += [(_plain_dict, "collections.defaultdict")]  # torch fills in no other kind of dict
    plain = [np.ndarray, np.dtype, argparse.Namespace, pathlib.PosixPath]
    return [*spelt, *plain, collections.Counter, list, dict, set, *kinds]


def _plain_dict(*_: object) -> dict[Any, Any]:
    return {}

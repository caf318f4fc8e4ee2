"""Load one checkpoint file without running code from it, unless the user trusts it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landscape.checkpoints.outline import HARMLESS, Outline, of_zip, refusal
from landscape.checkpoints.raw_files import check_sums, header, unreadable

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
    """Load a safetensors file, which cannot hold code.

    Raises:
        ValueError: it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    header(path)  # checks the declared sizes before memory is reserved
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); it may be truncated") from None


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
        raise unreadable(path, str(error) or type(error).__name__) from None

"""Read and write checkpoints: weights and plain data, never code."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints import file_formats, file_kinds
from landscape.checkpoints.containers import FORMAT, Weights, architecture_in, is_native, weights_in
from landscape.checkpoints.safe_load import Program
from landscape.checkpoints.state_dict_fit import is_head
from landscape.results import declared_size
from landscape.results.versions import versions

FINAL = "final.pt"  # the last weights of a run of the trainer
FINAL_EMA = "final_ema.pt"  # their moving average, a separate checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file, and what the file says about them.

    Args:
        path: the file, or the folder.
        state_dict: name -> tensor, on the CPU.
        model: name of a bundled model; "" if the file does not say.
        arch: the architecture as another trainer names it, such as timm's `vit_tiny_patch16_224`, or `hf:FOLDER` for a
            folder with its own config; "" if the file does not say. To be looked up, never imported.
        taken: which of the file's weights these are, for messages.
        missing: names of the model's weights that were left as initialised, once loaded into a model.
        others: further entries of the file that hold weights.
        weights: which of two networks in one state dict: the trained one ("raw") or its moving average ("ema").
        epoch: a float, init 0; NaN if the file does not say.
        module: the model itself, if the file is a program or a pickled module.
        batch_size: the only one that a program accepts; 0 for any.
    """

    path: Path
    state_dict: dict[str, Tensor]
    model: str = ""
    arch: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    epoch: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    taken: str = "state_dict"
    missing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    weights: Weights = "raw"
    module: nn.Module | None = field(default=None, repr=False)
    batch_size: int = 0

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file's bytes (for several files, of their names and digests), computed at first access."""
        return file_formats.sha256_of(self.path)

    @property
    def native(self) -> bool:
        """Whether the file is in this project's format, and names the model to build."""
        return bool(self.model)

    @property
    def headless(self) -> bool:
        """Whether the model's classifier, or a part of it, was left as initialised."""
        return any(is_head(name) for name in self.missing)


def write_checkpoint(
    path: Path,
    *,
    model: str,
    model_args: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    data: Mapping[str, Any],
    recipe: Mapping[str, Any],
    epoch: float,
    metrics: Mapping[str, float],
    seed: int,
) -> None:
    """Write a checkpoint atomically: afterwards the file is either the old one or the complete new one."""
    content = {
        "format": FORMAT,
        "model": model,
        "model_args": dict(model_args),
        "state_dict": {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in state_dict.items()
        },
        "data": dict(data),
        "recipe": dict(recipe),
        "epoch": float(epoch),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "seed": int(seed),
        "versions": versions(),
    }
    save_atomically(content, path)


def save_atomically(content: object, path: Path) -> None:
    """`torch.save` to a temporary file in the same folder, then replace; a full disk leaves the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; free some space, then run again") from error
    except RuntimeError as error:  # raised by torch when its zip writer cannot write
        raise OSError(f"cannot write {path}: the disk is full; free some space, then run again") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read_checkpoint(path: Path | str, *, weights: Weights = "raw", trust_pickle: bool = False) -> Checkpoint:
    """Read a checkpoint of this project or of another tool, without running code from it.

    Args:
        path: a file of torch.save, TorchScript, torch.export or safetensors; an index of shards; or a Hugging Face
            folder.
        weights: "raw" takes the model's own weights, "ema" their moving average if the file has one; for a run's
            `final.pt`, that is the checkpoint `final_ema.pt` beside it.
        trust_pickle: unpickle arbitrary objects and load programs. Runs code from the file: only for files of your own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, is damaged, has a newer format, or holds code.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}; give an existing file, or make one: landscape train")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder; expected a checkpoint")
    content = file_kinds.load(path, trust_pickle=trust_pickle)
    if isinstance(content, nn.Module | Program):
        return _of_module(path, content)
    try:
        native = is_native(content)
        averaged = native and weights == "ema" and path.name == FINAL and path.with_name(FINAL_EMA).exists()
        found = weights_in(content, "raw" if averaged else weights)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if averaged:
        average = read_checkpoint(path.with_name(FINAL_EMA))
        return replace(average, taken=f"{average.taken}, the moving average beside {FINAL}")
    _refuse_oversized(path, found.weights)
    plain = Checkpoint(path, found.weights, taken=found.taken, others=found.others, weights=weights)
    if not native:
        arch, epoch = _about(path, content)
        return replace(plain, arch=arch, epoch=epoch)
    # a snapshot may be stored in half precision, but the model computes in single
    single = {name: t.float() if t.dtype == torch.float16 else t for name, t in found.weights.items()}
    try:
        return replace(
            plain,
            state_dict=single,
            model=content["model"],
            model_args=dict(content["model_args"]),
            data=dict(content["data"]),
            recipe=dict(content["recipe"]),
            epoch=float(content["epoch"]),
            metrics=dict(content["metrics"]),
            seed=int(content["seed"]),
            versions=dict(content["versions"]),
        )
    except KeyError as error:
        raise ValueError(f"{path} is incomplete: it lacks the entry {error} of a format-{FORMAT} checkpoint") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a format-{FORMAT} checkpoint: an entry has another type ({error})") from None


def _of_module(path: Path, content: nn.Module | Program) -> Checkpoint:
    module, size = (content.module, content.batch_size) if isinstance(content, Program) else (content, 0)
    kind = "the program" if isinstance(content, Program) else "the pickled module"
    return Checkpoint(path, dict(module.state_dict()), taken=f"{kind} itself", module=module, batch_size=size)


def _about(path: Path, content: Mapping[str, Any]) -> tuple[str, float]:
    """Architecture and epoch, from the content or from the other files of its folder."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(file_formats.INDEX) else None
    if folder is None:
        return architecture_in(content), _number(content.get("epoch"))
    config, state = (
        file_formats.json_of(f) if f.is_file() else {} for f in (folder / "config.json", folder / "trainer_state.json")
    )
    own = config.get("architecture")  # timm's config names it; transformers' needs the folder to build from
    arch = own if isinstance(own, str) else f"hf:{folder}" if "model_type" in config else ""
    return arch, _number(state.get("epoch"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _refuse_oversized(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not dense numbers, and views that would grow far beyond the file when copied."""
    for name, tensor in weights.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = (
                "quantized" if tensor.is_quantized else "meta" if tensor.device.type == "meta" else str(tensor.layout)
            )
            raise ValueError(f"{path}: {name} is a {kind} tensor, expected plain numbers; save it as a dense tensor")
    declared = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    held = sum(file.stat().st_size for file in file_formats.files_of(path))
    declared_size.refuse_oversized(
        str(path), "tensors", declared, held, expansion=declared_size.EXPANSION, slack=declared_size.SLACK
    )


def state_dict_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, independent of the file format."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def newest_checkpoint(root: Path = Path("checkpoints")) -> Path:
    """The newest `final.pt` below a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(root.glob(f"**/{FINAL}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"no checkpoint given and no {FINAL} under {root}/; "
            "name one, or make one: landscape train vit_demo --data digits"
        )
    return files[-1]


def label_of(path: Path) -> str:
    """The default label: for `final.pt` the name of the run folder, for other snapshots folder and stem."""
    folder = path.resolve().parent.name
    if path.is_dir() or path.name in file_formats.IN_FOLDER:
        return path.resolve().name if path.is_dir() else folder
    if path.name == FINAL:
        return folder
    if path.name == FINAL_EMA or re.fullmatch(r"init|warmup|epoch_\d+", path.stem):
        return f"{folder}-{path.stem}"
    return path.stem

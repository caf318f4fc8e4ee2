"""Read and write checkpoints: weights and plain data, never code."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints import file_formats, key_matching, raw_files
from landscape.checkpoints.containers import FORMAT, Weights, architecture_in, is_native, weights_in
from landscape.checkpoints.file_formats import Program
from landscape.checkpoints.file_names import FINAL, FINAL_EMA, model_hint, place_of
from landscape.results.replacing import replacing
from landscape.results.run_key import versions

ENTRIES: Mapping[str, Callable[[Any], Any]] = {  # of a checkpoint of this project, beside the weights
    "model": str, "model_args": dict, "data": dict, "recipe": dict, "epoch": float, "metrics": dict, "seed": int,
    "versions": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file, and what the file says about them."""

    path: Path  # the file, or the folder
    state_dict: dict[str, Tensor]  # name -> tensor, on the CPU
    model: str = ""  # name of a bundled model; "" if the file does not say
    # the architecture as another trainer names it, such as timm's `vit_tiny_patch16_224`, or `hf:FOLDER` for a folder
    # with its own config; "" if the file does not say. To be looked up, never imported.
    arch: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    epoch: float = float("nan")  # init 0; NaN if the file does not say
    metrics: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    taken: str = "state_dict"  # which of the file's weights these are, for messages
    missing: tuple[str, ...] = ()  # the model's weights that were left as initialised, once loaded into a model
    others: tuple[str, ...] = ()  # further entries of the file that hold weights
    weights: Weights = "raw"  # of two networks in one state dict, the trained one, or its moving average ("ema")
    size: int = 0  # bytes of the files
    module: nn.Module | None = field(default=None, repr=False)  # if the file is a program or a pickled module
    batch_size: int = 0  # the only one that a program accepts; 0 for any
    # configuration of an adapter of peft, whose tensors these are; empty for the weights of a whole model
    adapter: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file's bytes (for several files, of their names and digests), computed at first access."""
        return raw_files.sha256_of(self.path)

    @property
    def native(self) -> bool:
        """Whether the file is in this project's format, and names the model to build."""
        return bool(self.model)

    @property
    def initial(self) -> bool | None:
        """Whether these are initial weights, by our epoch 0 or another file's name.

        None for another file of epoch 0, which may be the first finished epoch of a counter that starts at 0.
        """
        if self.native:
            return self.epoch == 0
        if place_of(self.path).stage == "init" and not self.epoch > 0:
            return True
        return None if self.epoch == 0 else False

    @property
    def headless(self) -> bool:
        """Whether the model's classifier, or a part of it, was left as initialised."""
        return any(key_matching.is_head(name) for name in self.missing)


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
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically: afterwards the file is either the old one or the complete new one.

    `optimizer` is the state dict of the optimiser, where it is kept too.
    """
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
    if optimizer is not None:
        content["optimizer"] = optimizer
    save_atomically(content, path)


def save_atomically(content: object, path: Path) -> None:
    """`torch.save` to a temporary file in the same folder, then replace; a full disk leaves the old file intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as stream:
            torch.save(content, stream)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}; free some space, then run again") from error
    except RuntimeError as error:  # raised by torch when its zip writer cannot write
        raise OSError(f"cannot write {path}: the disk is full; free some space, then run again") from error


def read_checkpoint(path: Path | str, *, weights: Weights = "raw", trust_pickle: bool = False) -> Checkpoint:
    """Read a checkpoint of this project or of another tool, without running code from it.

    Args:
        path: a file of torch.save, TorchScript, torch.export or safetensors; an index of shards; or a Hugging Face
            folder.
        weights: "raw" takes the model's own weights, "ema" their moving average if the file has one; for a run's
            `final.pt`, that is the checkpoint `final_ema.pt` in the same folder.
        trust_pickle: unpickle arbitrary objects and load programs. Runs code from the file: only for files of your own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, is damaged, has another format, or holds code.
    """
    path = Path(path)
    if not path.exists():
        hint = model_hint(path)
        raise FileNotFoundError(f"no checkpoint at {path}{hint}; give an existing file, or make one: landscape train")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder; expected a checkpoint")
    content = file_formats.load(path, trust_pickle=trust_pickle)
    size = sum(raw_files.files_of(path).values())
    if isinstance(content, nn.Module | Program):
        kind, program = ("program", content) if isinstance(content, Program) else ("pickled module", Program(content))
        return Checkpoint(
            path, dict(program.module.state_dict()), taken=f"the {kind} itself", size=size, module=program.module,
            batch_size=program.batch_size,
        )  # fmt: skip
    try:
        native = is_native(content)
        averaged = native and weights == "ema" and path.name == FINAL and path.with_name(FINAL_EMA).exists()
        found = weights_in(content, "raw" if averaged else weights)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if averaged:
        average = read_checkpoint(path.with_name(FINAL_EMA))
        return replace(average, taken=f"{average.taken}, the moving average beside {FINAL}")
    check_tensors(path, found.weights, size)
    plain = Checkpoint(path, found.weights, taken=found.taken, others=found.others, weights=weights, size=size)
    if not native:
        if path.is_dir() and raw_files.holds_adapter(path):
            adapter = raw_files.json_of(path / raw_files.ADAPTER_CONFIG)
            base = adapter.get("base_model_name_or_path")
            arch = f"hf:{base}" if isinstance(base, str) and base else ""
            return replace(plain, arch=arch, adapter=adapter, taken="adapter")
        arch, epoch = _about(path, content)
        return replace(plain, arch=arch, epoch=epoch)
    # a snapshot may be stored in half precision, but the model computes in single
    single = {name: t.float() if t.dtype == torch.float16 else t for name, t in found.weights.items()}
    try:
        return replace(plain, state_dict=single, **{name: kind(content[name]) for name, kind in ENTRIES.items()})
    except KeyError as error:
        raise ValueError(f"{path} is incomplete: it lacks the entry {error} of a format-{FORMAT} checkpoint") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is not a format-{FORMAT} checkpoint: an entry has another type ({error})") from None


def _about(path: Path, content: Mapping[str, Any]) -> tuple[str, float]:
    """Architecture and epoch, from the content or from the other files of its folder."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(raw_files.INDEX) else None
    if folder is None:
        return architecture_in(content), _number(content.get("epoch"))
    config, state = (
        raw_files.json_of(f) if f.is_file() else {} for f in (folder / "config.json", folder / "trainer_state.json")
    )
    own = config.get("architecture")  # timm's config names it; transformers' needs the folder to build from
    arch = own if isinstance(own, str) else f"hf:{folder}" if "model_type" in config else ""
    return arch, _number(state.get("epoch"))


def _number(value: object) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")


def check_tensors(path: Path, weights: Mapping[str, Tensor], size: int) -> None:
    """Refuse tensors that are not dense numbers, and views that would grow far beyond a file of `size` bytes."""
    for name, tensor in weights.items():
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        if kind is not torch.strided:
            raise ValueError(f"{path}: {name} is a {kind} tensor, expected plain numbers; save it as a dense tensor")
    declared = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    raw_files.refuse_expanding(path, "tensors", declared, size)


def state_dict_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, independent of the file format."""
    return tensors_sha256((f"{name}:", state_dict[name]) for name in sorted(state_dict))


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]], end: str = "") -> str:
    """SHA-256 over tensors in their order, each behind a text: dtypes, shapes and bytes; and over a text at the end."""
    digest = hashlib.sha256()
    for text, tensor in tensors:
        digest.update(f"{text}{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(end.encode())
    return digest.hexdigest()


def newest_checkpoint(root: Path = Path("checkpoints")) -> Path:
    """The newest `final.pt` below a folder. Raises FileNotFoundError: there is none."""
    files = sorted(root.glob(f"**/{FINAL}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"no checkpoint given and no {FINAL} under {root}/; name one, or make one: "
            "landscape train vit_demo --data digits"
        )
    return files[-1]

"""Checkpoints, read and written: plain data and tensors, never code."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from landscape.checkpoints import file_formats
from landscape.checkpoints.containers import FORMAT, Weights, architecture_in, is_native, weights_in
from landscape.checkpoints.file_formats import file_sha256 as file_sha256
from landscape.checkpoints.safe_load import Program, safe_load
from landscape.checkpoints.state_dict_fit import Fit, fit, grouped, of_a_head
from landscape.checkpoints.transformers_keys import of_transformers, renamed
from landscape.results.versions import versions

EXPANSION = 16  # most that tensors may be larger than their file, by sharing memory
SLACK = 2**26  # bytes below which that does not matter
FINAL = "final.pt"  # the last weights of a run of the trainer
FINAL_EMA = "final_ema.pt"  # beside them their moving average, a checkpoint of its own
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: the weights, and where they come from as far as the file says.

    Args:
        path: the file, or the folder.
        state_dict: name -> tensor, on the CPU.
        model: trainer's model name or "" where the file does not say.
        arch: name of the architecture in another trainer's words, such as timm's `vit_tiny_patch16_224`, or `hf:FOLDER`
            of a folder with its own config; "" where the file does not say. To be looked up, never imported.
        taken: in words, which of the file's weights these are.
        missing: names of the model's weights that are as initialised, once it has been loaded into one.
        others: further entries of the file that hold weights.
        weights: of two networks in one state dict, the trained one ("raw") or its moving average ("ema").
        epoch: a float, init 0; NaN where the file does not say.
        module: of a program or a pickled module, the model itself.
        batch_size: the only one that a program takes; 0 for any.
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
        """SHA-256 of the file's bytes; of several files, over their names and digests. Read at the first request."""
        return file_formats.sha256_of(self.path)

    @property
    def native(self) -> bool:
        """Whether the file is one of ours and rebuilds its model by itself."""
        return bool(self.model)

    @property
    def headless(self) -> bool:
        """Whether the classifier that it was loaded into, or a part of it, is as initialised."""
        return any(of_a_head(name) for name in self.missing)


def write(
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
    """Write one checkpoint, atomically: the file is either the old one or the complete new one."""
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
    """`torch.save` to a temporary neighbour, then replace; a full disk leaves the previous file intact."""
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
    except RuntimeError as error:  # as which torch reports a failed write of its zip writer
        raise OSError(f"cannot write {path}: the disk is full; free some space, then run again") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(path: Path | str, *, weights: Weights = "raw", trust_pickle: bool = False) -> Checkpoint:
    """Read a checkpoint, ours or foreign, without ever running code from it.

    Args:
        path: a file of torch.save, of TorchScript, torch.export or safetensors; an index of shards; or a folder of
            Hugging Face's.
        weights: "raw" takes the model itself, "ema" its moving average where the file has one; of a run's `final.pt`
            the checkpoint `final_ema.pt` beside it.
        trust_pickle: unpickle arbitrary objects and load programs. Runs code from the file: only for files of your own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint, is damaged, is from a newer format, or holds code.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}; give an existing file, or make one: landscape train")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is neither a file nor a folder, expected a checkpoint")
    content = safe_load(path, trust_pickle=trust_pickle)
    if isinstance(content, nn.Module | Program):
        return _of_module(path, content)
    try:
        native = is_native(content)
        averaged = native and weights == "ema" and path.name == FINAL and path.with_name(FINAL_EMA).exists()
        found = weights_in(content, "raw" if averaged else weights)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if averaged:
        average = read(path.with_name(FINAL_EMA))
        return replace(average, taken=f"{average.taken}, the moving average beside {FINAL}")
    _refuse_absurd(path, found.weights)
    plain = Checkpoint(path, found.weights, taken=found.taken, others=found.others, weights=weights)
    if not native:
        arch, epoch = _about(path, content)
        return replace(plain, arch=arch, epoch=epoch)
    # half precision is how a snapshot may be stored, not what it computes in
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
        raise ValueError(f"{path} lacks the entry {error} of a format-{FORMAT} checkpoint; it is incomplete") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} is no format-{FORMAT} checkpoint: an entry is of another kind ({error})") from None


def _of_module(path: Path, content: nn.Module | Program) -> Checkpoint:
    module, size = (content.module, content.batch_size) if isinstance(content, Program) else (content, 0)
    kind = "the program" if isinstance(content, Program) else "the pickled module"
    return Checkpoint(path, dict(module.state_dict()), taken=f"{kind} itself", module=module, batch_size=size)


def _about(path: Path, content: Mapping[str, Any]) -> tuple[str, float]:
    """Architecture and epoch, from the content or from what lies beside it in a folder."""
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


def _refuse_absurd(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse tensors without values, and ones that grow when they are copied."""
    for name, tensor in weights.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            kind = (
                "quantized" if tensor.is_quantized else "meta" if tensor.device.type == "meta" else str(tensor.layout)
            )
            raise ValueError(f"{path}: {name} is a {kind} tensor, expected plain numbers; save it as a dense tensor")
    needed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    held = sum(file.stat().st_size for file in file_formats.files_of(path))
    if needed > EXPANSION * held + SLACK:
        raise ValueError(f"{path} has {held:,} bytes and declares tensors of {needed:,} bytes; refused")


def load_into(
    model: nn.Module, checkpoint: Checkpoint, *, allow_missing: bool = False, logits: bool = True
) -> Checkpoint:
    """Copy the weights into a module, after removing wrappers' names and prefixes.

    Args:
        model: takes the weights.
        checkpoint: has them.
        allow_missing: leave what is missing, or of another shape, as it was initialised.
        logits: whether the model's outputs are used; else its classifier alone may be missing.

    Returns:
        the checkpoint, whose `taken` also says which prefix came off, what was dropped and what is missing.

    Raises:
        ValueError: keys are missing or unexpected, or shapes differ; lists the first few of each, and the prefix
            without which most fit. With `allow_missing`: nothing fits.
    """
    wanted, given = model.state_dict(), checkpoint.state_dict
    found = fit(given, wanted, checkpoint.weights)
    if (found.missing or found.unexpected) and checkpoint.path.is_dir() and of_transformers(model):
        given = renamed(model, checkpoint.path)
        found = fit(given, wanted)
    tied = _tied(wanted)
    missing = [name for name in found.missing if not tied[name] & found.names.keys()]
    found = replace(found, missing=tuple(missing))

    def may_miss(name: str) -> bool:
        # the counter that batch norm has kept since PyTorch 0.4.1, and that no forward pass in eval mode reads
        return allow_missing or name.endswith("num_batches_tracked") or (not logits and of_a_head(name))

    differing = [name for name, own in found.names.items() if given[own].shape != wanted[name].shape]
    lacking = [name for name in found.missing if not may_miss(name)]
    if lacking or (found.unexpected and not allow_missing):
        raise ValueError(f"{checkpoint.path} does not fit the model: {_misfit(found, len(wanted))}")
    for name in differing:
        if not may_miss(name):
            raise ValueError(
                f"{checkpoint.path} does not fit the model: {name} is {tuple(given[found.names[name]].shape)} in the "
                f"file and {tuple(wanted[name].shape)} in the model; check --model-arg (classes, image_size), or leave "
                "such weights as initialised with --allow-missing"
            )
    for name, own in found.names.items():
        if wanted[name].is_floating_point() and not given[own].is_floating_point():
            raise ValueError(
                f"{checkpoint.path} has {own} as {str(given[own].dtype).removeprefix('torch.')} and the model as "
                f"{str(wanted[name].dtype).removeprefix('torch.')}: quantized weights lack their scales here; "
                "save them in floating point"
            )
    found = found.without(differing)
    if not found.names:
        raise ValueError(f"{checkpoint.path} has none of the model's {len(wanted)} weights; give another --model")
    model.load_state_dict({name: given[own] for name, own in found.names.items()}, strict=False)
    taken = ", ".join(filter(None, (checkpoint.taken, found.words)))
    return replace(checkpoint, taken=taken, missing=found.missing)


def _tied(weights: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """Of every weight the names that share its numbers: a file may hold one of them alone, as safetensors must."""
    places: dict[tuple[int, torch.Size, tuple[int, ...]], set[str]] = {}
    for name, tensor in weights.items():
        places.setdefault((tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride()), set()).add(name)
    return {name: names for names in places.values() for name in names}


def _misfit(found: Fit, wanted: int) -> str:
    dropped = f"; dropped {grouped(found.dropped)}" if found.dropped else ""
    change = found.prefix or found.added
    how = f"{'without' if found.prefix else 'with'} the prefix {change}" if change else "with the names as they are"
    return (
        f"{len(found.missing)} missing keys{_first(found.missing)}, {len(found.unexpected)} unexpected "
        f"keys{_first(found.unexpected)}{dropped}; best fit: {len(found.names)} of {wanted} {how}; "
        "give the model that made it with --model, or leave these out with --allow-missing"
    )


def fitted(state_dict: Mapping[str, T], wanted: set[str]) -> dict[str, T]:
    """The same weights (or their shapes) under the names that fit best; what nothing explains keeps its own."""
    found = fit(state_dict, wanted)
    names = {own: name for name, own in found.names.items()} | {own: own for own in found.unexpected}
    return {names[own]: value for own, value in state_dict.items() if own in names}


def weights_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, whatever file held them."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def newest(root: Path = Path("checkpoints")) -> Path:
    """The newest `final.pt` below a folder.

    Raises:
        FileNotFoundError: there is none; says how to make one.
    """
    files = sorted(root.glob(f"**/{FINAL}"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"no checkpoint given and no {FINAL} under {root}/; "
            "name one, or make one: landscape train vit_demo --data digits"
        )
    return files[-1]


def label_of(path: Path) -> str:
    """The default label: the run folder's name for its `final.pt`, folder and stem for other snapshots."""
    folder = path.resolve().parent.name
    if path.is_dir() or path.name in file_formats.IN_FOLDER:
        return path.resolve().name if path.is_dir() else folder
    if path.name == FINAL:
        return folder
    if path.name == FINAL_EMA or re.fullmatch(r"init|warmup|epoch_\d+", path.stem):
        return f"{folder}-{path.stem}"
    return path.stem


def _first(names: tuple[str, ...]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""

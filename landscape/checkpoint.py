"""Checkpoints, read and written: plain data and tensors, never code."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from landscape.safe_load import safe_load

FORMAT = 1
CONTAINERS = ("state_dict", "model_state_dict", "model", "net", "params", "module")
EMA_CONTAINERS = ("state_dict_ema", "model_ema", "ema")
PREFIXES = ("module.", "model.", "_orig_mod.")
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: the weights, and where they come from as far as the file says.

    Args:
        path: the file.
        sha256: of the file's bytes.
        state_dict: name -> tensor, on the CPU.
        model: trainer's model name or "" where the file does not say.
        taken: in words, which of the file's weights these are.
        epoch: a float, init 0; NaN where the file does not say.
    """

    path: Path
    sha256: str
    state_dict: dict[str, Tensor]
    model: str = ""
    model_args: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    epoch: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    taken: str = "state_dict"

    @property
    def native(self) -> bool:
        """Whether the file is one of ours and rebuilds its model by itself."""
        return bool(self.model)


def versions() -> dict[str, str]:
    """Versions of everything that can move a number."""
    names = ("torch", "numpy", "scipy", "h5py")
    return {
        "landscape": metadata.version("landscape-probes"),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
    }


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


def read(
    path: Path | str,
    *,
    weights: Literal["raw", "ema"] = "raw",
    trust_pickle: bool = False,
) -> Checkpoint:
    """Read a checkpoint, ours or foreign, without ever running code from it.

    Args:
        path: `.pt`, `.pth`, `.ckpt` (torch) or `.safetensors`.
        weights: "raw" takes the model itself, "ema" its moving average where the file has one.
        trust_pickle: unpickle arbitrary objects. Runs code from the file: only for files of your own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint, is damaged, is from a newer format, or holds code.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {path}; give an existing file, or make one: landscape train")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, expected a checkpoint file such as {path / 'final.pt'}")
    digest = file_sha256(path)
    content = safe_load(path, trust_pickle=trust_pickle)
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a dict of tensors (a state dict)")
    native = isinstance(content.get("format"), int) and isinstance(content.get("model"), str)
    if native and content["format"] > FORMAT:
        raise ValueError(f"{path} has format {content['format']}, this version reads up to {FORMAT}; update landscape")
    state_dict, taken = _weights_in(content, path, weights)
    if native:  # half precision is how a snapshot may be stored, not what it computes in
        state_dict = {n: t.float() if t.dtype == torch.float16 else t for n, t in state_dict.items()}
    if not native:
        epoch = content.get("epoch", float("nan"))
        number = float(epoch) if isinstance(epoch, int | float) else float("nan")
        return Checkpoint(path, digest, state_dict, epoch=number, taken=taken)
    try:
        return Checkpoint(
            path=path,
            sha256=digest,
            state_dict=state_dict,
            model=content["model"],
            model_args=dict(content["model_args"]),
            data=dict(content["data"]),
            recipe=dict(content["recipe"]),
            epoch=float(content["epoch"]),
            metrics=dict(content["metrics"]),
            seed=int(content["seed"]),
            versions=dict(content["versions"]),
            taken=taken,
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks the entry {error} of a format-{FORMAT} checkpoint; it is incomplete") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no format-{FORMAT} checkpoint: an entry is of another kind ({error})") from None


def load_into(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy the weights into a module, strictly, after removing wrappers' prefixes in any nesting.

    Raises:
        ValueError: keys are missing or unexpected, or shapes differ; lists the first few of each.
    """
    wanted = model.state_dict()
    found = fitted(checkpoint.state_dict, set(wanted))
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"{checkpoint.path} does not fit the model: {len(missing)} missing keys{_first(missing)}, "
            f"{len(unexpected)} unexpected keys{_first(unexpected)}; give the model that made it with --model"
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.path} does not fit the model: {name} is {tuple(found[name].shape)} in the file and "
                f"{tuple(tensor.shape)} in the model; check --model-arg (classes, image_size)"
            )
    model.load_state_dict({name: found[name] for name in wanted})


def fitted(state_dict: Mapping[str, T], wanted: set[str]) -> dict[str, T]:
    """The same weights (or their shapes) under the names that fit best, without `module.`, `model.`, `_orig_mod.`."""
    best = current = dict(state_dict)
    while True:
        prefix = next((p for p in PREFIXES if current and all(k.startswith(p) for k in current)), None)
        if prefix is None:
            inner = {k.replace("_orig_mod.", ""): v for k, v in current.items()}
            candidates = [best, inner]
            return max(candidates, key=lambda names: len(wanted & set(names)))
        current = {name[len(prefix) :]: tensor for name, tensor in current.items()}
        if len(wanted & set(current)) > len(wanted & set(best)):
            best = current


def weights_sha256(state_dict: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, whatever file held them."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def newest(root: Path = Path("checkpoints")) -> Path:
    """The newest `final.pt` below a folder.

    Raises:
        FileNotFoundError: there is none; says how to make one.
    """
    files = sorted(root.glob("**/final.pt"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"no checkpoint given and no final.pt under {root}/; "
            "name one, or make one: landscape train vit_demo --data digits"
        )
    return files[-1]


def label_of(path: Path) -> str:
    """The default label: the run folder's name for its `final.pt`, folder and stem for other snapshots."""
    folder = path.resolve().parent.name
    if path.name == "final.pt":
        return folder
    if re.fullmatch(r"init|warmup|epoch_\d+", path.stem):
        return f"{folder}-{path.stem}"
    return path.stem


def _weights_in(content: Mapping[str, Any], path: Path, weights: str) -> tuple[dict[str, Tensor], str]:
    names = CONTAINERS if weights == "raw" else EMA_CONTAINERS
    found = [name for name in names if _is_state_dict(content.get(name))]
    if found:
        return dict(content[found[0]]), found[0]
    if weights == "ema":
        raise ValueError(f"{path} has no moving average ({', '.join(EMA_CONTAINERS)}); drop --weights ema")
    if _is_state_dict(content):
        return {name: value for name, value in content.items() if isinstance(value, Tensor)}, "the file itself"
    raise ValueError(
        f"{path} holds no weights: expected a dict of tensors or one under {', '.join(CONTAINERS)}, "
        f"got the keys {', '.join(map(str, list(content)[:6]))}"
    )


def _is_state_dict(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
        and all(isinstance(tensor, Tensor) for tensor in value.values())
    )


def _first(names: list[str]) -> str:
    return f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""

"""The traced Hessian products of a subject on disk, as text: a later run loads them in milliseconds.

What is on disk is found by what it was made of (the code and configuration of model and loss, shapes, versions), before
anything is traced. That can miss a change, say in a function that an installed package calls; callers therefore compare
a product of every loaded graph with double backward, and trace the model where it differs. A file counts only if it
belongs to the user and nobody else can write it; one that cannot be read is made again.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import landscape
from landscape.data import user_cache
from landscape.products.interpreted_graph import InterpretedGraph
from landscape.products.traced_hessian import TracedHessian, replays, shape_of
from landscape.subject.loading.code_identity import object_sha256
from landscape.subject.members import unpositioned
from landscape.subject.subject import Subject

MOST_BYTES, MOST_FILES = 2 * 2**30, 200  # the files used last stay


def key_of(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool) -> str:
    """SHA-256 of everything that the traced products of a subject follow from; empty if that cannot be told."""
    inputs, targets = subject.batch(0)
    if not isinstance(unpositioned(inputs), Tensor) or not isinstance(targets, Tensor):
        return ""
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    try:
        parts = [
            object_sha256(subject.model, weights=False), object_sha256(subject.losses), object_sha256(subject.forward),
            [[name, str(t.dtype), list(t.shape), list(t.stride())] for name, t in tensors.items()],
            list(parameters), fixed, [str(part) for part in shape_of(inputs, targets)],
            _versions(subject.model), _own_code(),
            [torch.__version__, subject.device.type, torch.backends.cpu.get_cpu_capability()],
        ]  # fmt: skip
    except Exception:  # whatever the attributes of a user's module raise
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _versions(model: nn.Module) -> list[str]:
    """Of the packages that define the modules."""
    found = []
    for name in sorted({type(module).__module__.partition(".")[0] for module in model.modules()}):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


@functools.cache
def _own_code() -> str:
    """SHA-256 of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(landscape.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def folder() -> Path | None:
    """Where graphs are kept; None if nothing is kept."""
    return user_cache.folder("traced", "traced graphs")


def is_stored(key: str) -> bool:
    """Whether there is a graph under a key; it may prove unusable."""
    path = folder() if key else None
    return path is not None and (path / f"{key}.json").is_file()


def load(
    subject: Subject, parameters: Mapping[str, Tensor], layout: torch.memory_format, key: str
) -> TracedHessian | None:
    """The products that an earlier run recorded; None if there are none."""
    found = _read(key)
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    try:
        once, each = map(InterpretedGraph, found["graphs"])
        constants = [tensors[name].detach() for name in found["constants"]]
    except (KeyError, TypeError, ValueError, RuntimeError):
        return None
    inputs, targets = subject.batch(0)
    assert isinstance(targets, Tensor)
    return TracedHessian(dict(parameters), shape_of(inputs, targets), layout, 0, constants, *replays(once, each))


def store(subject: Subject, recorded: TracedHessian, key: str) -> None:
    """Leave recorded products on disk for later runs, where nothing but the model's own tensors is constant in them."""
    names, graphs = _names(subject.model, recorded.constants), recorded.graphs
    if key and names is not None and all(isinstance(graph, InterpretedGraph) for graph in graphs):
        texts = [graph.text for graph in graphs if isinstance(graph, InterpretedGraph)]
        _write(f"{key}.json", {"constants": names, "graphs": texts})


def _read(key: str) -> dict[str, Any]:
    path = folder() if key else None
    file = None if path is None else path / f"{key}.json"
    if file is None or not user_cache.is_own(file):
        return {}
    try:
        content = json.loads(file.read_text())
        os.utime(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(name: str, content: Mapping[str, Any]) -> None:
    path = folder()
    if path is None:
        return
    with contextlib.suppress(OSError):
        user_cache.write(path / name, json.dumps(content).encode())
        user_cache.forget_oldest(path, MOST_BYTES, MOST_FILES)


def _names(model: nn.Module, constants: Sequence[Tensor]) -> list[str] | None:
    """The names of parameters and buffers; None if one of the tensors is neither."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_place = {(t.data_ptr(), t.shape, t.stride()): name for name, t in tensors.items() if t.numel()}
    names = [by_place.get((t.data_ptr(), t.shape, t.stride())) for t in constants]
    return None if None in names else [name for name in names if name is not None]

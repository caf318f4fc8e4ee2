"""The recorded or compiled Hessian products of a subject, from disk where an earlier run left them.

What is on disk is found by what it was made of (the code and configuration of model and loss, shapes, versions), before
anything is traced. That can miss a change, say in a function that an installed package calls; callers therefore compare
a product of every loaded graph with double backward, and trace the model where it differs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

import landscape
from landscape.curvature import stored_graphs
from landscape.curvature.traced_hessian import TracedHessian, shape_of
from landscape.subject.code_identity import object_sha256
from landscape.subject.graph_replay import GraphReplay
from landscape.subject.members import unpositioned
from landscape.subject.subject import Subject

CPU = Path("/proc/cpuinfo")


def key_of(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool) -> str:
    """SHA-256 of everything that the compiled products of a subject follow from; empty if that cannot be told."""
    inputs, targets = subject.batch(0)
    if not isinstance(unpositioned(inputs), Tensor) or not isinstance(targets, Tensor):
        return ""
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    try:
        parts = [
            object_sha256(subject.model, weights=False), object_sha256(subject.losses), object_sha256(subject.forward),
            [[name, str(t.dtype), list(t.shape), list(t.stride())] for name, t in tensors.items()],
            list(parameters), fixed, [str(part) for part in shape_of(inputs, targets)],
            _versions(subject.model), _own_code(), _machine(subject.device),
        ]  # fmt: skip
    except Exception:  # whatever the attributes of a user's module raise
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _machine(device: torch.device) -> list[str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, device.type, name, _instructions(), str(torch.get_num_threads())]


@functools.cache
def _instructions() -> str:
    """What the CPU can execute: compiled code uses all of it, and would end the process on a CPU that lacks some."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _versions(model: nn.Module) -> list[str]:
    """Of the packages that define the modules."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return [f"{name} {version}" for name in sorted(packages) for version in _version(name)]


def _version(package: str) -> Iterator[str]:
    try:
        yield metadata.version(package)
    except metadata.PackageNotFoundError:
        return


@functools.cache
def _own_code() -> str:
    """SHA-256 of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(landscape.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def load(
    subject: Subject, parameters: Mapping[str, Tensor], layout: torch.memory_format, key: str, kind: str = "compiled"
) -> TracedHessian | None:
    """The products that an earlier run compiled, or with another `kind` recorded; None if there are none."""
    if not key:
        return None
    found = stored_graphs.load(key) if kind == "compiled" else stored_graphs.load_recorded(key, kind)
    if found is None:
        return None
    once, each, about = found
    tensors = {**dict(subject.model.named_parameters()), **dict(subject.model.named_buffers())}
    names = about.get("constants")
    if not isinstance(names, list) or not all(name in tensors for name in names):
        return None
    constants = [tensors[name].detach() for name in names]
    inputs, targets = subject.batch(0)
    assert isinstance(targets, Tensor)
    return TracedHessian(
        dict(parameters),
        shape_of(inputs, targets),
        layout,
        0,
        constants,
        once,
        each,
        GraphReplay(each, "Hessian product"),
    )


def store(subject: Subject, recorded: TracedHessian, key: str, kind: str) -> None:
    """Leave recorded products on disk for later runs, where nothing but the model's own tensors is constant in them."""
    names = _names(subject.model, recorded.constants)
    if names is not None:
        stored_graphs.store_recorded(key, kind, recorded.graphs, {"constants": names})


def compile_traced(subject: Subject, traced: TracedHessian, pattern: Sequence[Tensor], key: str) -> TracedHessian:
    """The compiled products of a traced graph: those on disk if they were made of the same graph, else new ones.

    Raises:
        ValueError: the graph cannot be compiled.
    """
    graph = hashlib.sha256(traced.code.encode()).hexdigest()
    found = stored_graphs.load(key) if key else None
    if found is not None and found[2].get("graph") == graph:
        return traced.with_code(found[0], found[1])
    inputs, targets = subject.batch(0)
    assert isinstance(targets, Tensor)
    about = {"graph": graph, "constants": _names(subject.model, traced.constants)}
    return traced.compiled(inputs, targets, pattern, key=key, about=about)


def _names(model: nn.Module, constants: Sequence[Tensor]) -> list[str] | None:
    """The names of parameters and buffers; None if one of the tensors is neither."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_place = {(t.data_ptr(), t.shape, t.stride()): name for name, t in tensors.items() if t.numel()}
    names = [by_place.get((t.data_ptr(), t.shape, t.stride())) for t in constants]
    return None if None in names else [name for name in names if name is not None]

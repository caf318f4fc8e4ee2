"""Read the state of an optimiser from a training checkpoint, without running code from the file."""

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from landscape.checkpoints import checkpoint, file_formats, raw_files
from landscape.options import alternatives, naming, printable
from landscape.plugins import beside, plugins

Key = int | str  # of a parameter in a state: its position, or its name in a sharded one
# Names of entries, in the order of search; Lightning has a list, torch and most scripts one state dict.
ENTRIES = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim", "opt")
BESIDE = ("optimizer.pt", "optimizer.bin")  # of transformers and accelerate, in the folder of the weights
SCALERS = ("scaler", "grad_scaler", "scaler_state_dict", "amp_scaler", "native_amp_scaling_state", "MixedPrecision")
# How an update is computed, and not which; the last one tells Adam from AdamW.
FLAGS = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
# What schedulers and trainers add to the groups.
ADDED = {
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "lr_scale",
    "lr_mult", "name", "group_name",
}  # fmt: skip
# An entry that tells apart classes with the same hyper-parameters.
TELLING = {"Adamax": "exp_inf", "RAdam": "exp_avg_sq"}
NEEDED = (
    "save torch's optimizer.state_dict() as the entry `optimizer` beside the weights, or train with landscape train "
    "--snapshot-optimizer; or start a new one: --optimizer sgd --optimizer-arg lr=0.1"
)


class NoOptimizerState(ValueError):
    """The file holds no state of an optimiser."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimiser, as `torch.optim.Optimizer.state_dict` gives it."""

    path: Path  # the file that holds it
    taken: str  # its entry, for messages
    groups: tuple[Mapping[str, Any], ...]  # hyper-parameters of each group, and as `params` the keys of its parameters
    state: Mapping[Key, Mapping[str, Any]] = field(repr=False)  # of each parameter by key, tensors on the CPU
    scaled: bool = False  # a gradient scaler's state is in the file; this one is of gradients without the scale

    @property
    def keys(self) -> list[Key]:
        return [key for group in self.groups for key in group["params"]]

    @property
    def names(self) -> list[str]:
        """Names of the parameters, group by group; empty where the state has none."""
        if self.keys and all(isinstance(key, str) for key in self.keys):
            return [str(key) for key in self.keys]
        names = [name for group in self.groups for name in group.get("param_names") or ()]
        return [str(name) for name in names] if len(names) == len(self.keys) else []

    @property
    def steps(self) -> float | None:
        """Updates that were made; None where the state does not count them."""
        counted = [float(entries["step"]) for entries in self.state.values() if "step" in entries]
        return max(counted) if counted else None

    def shape(self, key: Key) -> torch.Size | None:
        """The shape of a parameter, by its entries; None where it has none.

        Entries of one number count steps; those of factored second moments are a row and a column.
        """
        tensors = {n: t.shape for n, t in self.state.get(key, {}).items() if isinstance(t, Tensor) and n != "step"}
        shaped = [shape for shape in tensors.values() if shape] or list(tensors.values())
        try:
            return torch.broadcast_shapes(*shaped) if shaped else None  # type: ignore[no-untyped-call]
        except RuntimeError:
            return shaped[0]

    @cached_property
    def kind(self) -> str:
        """The class of torch.optim, by the names of hyper-parameters and entries; "" where these do not tell."""
        given = {name for group in self.groups for name in group}
        entries = {name for values in self.state.values() for name in values}
        fitting = [
            name for name in class_names()
            if (own := arguments_of(name)) <= given <= own | FLAGS | ADDED
            and (not entries or TELLING.get(name, "") in {"", *entries})
        ]  # fmt: skip
        if set(fitting) == {"Adam", "AdamW"}:
            decoupled = {group.get("decoupled_weight_decay") for group in self.groups}
            if decoupled <= {True, False}:
                return "AdamW" if decoupled == {True} else "Adam"
            return "" if any(group["weight_decay"] for group in self.groups) else "Adam"
        return fitting[0] if len(fitting) == 1 else ""

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of hyper-parameters and entries."""
        tensors = {f"{key}.{name}": value for key, name, value in self._entries() if isinstance(value, Tensor)}
        plain = [(str(k), name, repr(v)) for k, name, v in self._entries() if not isinstance(v, Tensor)]
        groups = [sorted((name, repr(value)) for name, value in group.items()) for group in self.groups]
        return hashlib.sha256(f"{checkpoint.state_dict_sha256(tensors)} {sorted(plain)} {groups}".encode()).hexdigest()

    def _entries(self) -> Iterator[tuple[Key, str, Any]]:
        return ((key, name, value) for key, values in self.state.items() for name, value in values.items())


@cache
def _defaults() -> Mapping[str, set[Any]]:
    """What each hyper-parameter is by default in the optimisers of torch.optim."""
    found: dict[str, set[Any]] = {}
    for name in class_names():
        for key, parameter in inspect.signature(optimizer_class(name)).parameters.items():
            if key != "params":
                default = None if parameter.default is inspect.Parameter.empty else parameter.default
                found.setdefault(key, set()).add(default)
    return found


def _is_like(value: Any, default: Any) -> bool:
    """Whether a hyper-parameter can stand in place of a default: a finite number for a number, a pair for a pair."""
    if isinstance(default, tuple):
        fits = isinstance(value, tuple | list) and len(value) == len(default)
        return fits and all(starmap(_is_like, zip(value, default, strict=True)))
    if isinstance(default, bool) or not isinstance(default, int | float):
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and abs(value) < sys.float_info.max


def class_names() -> list[str]:
    """The optimisers of torch.optim, and of other packages."""
    kinds = {name: kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    own = [n for n, k in kinds.items() if issubclass(k, torch.optim.Optimizer) and k is not torch.optim.Optimizer]
    return [*own, *beside("optimizers", own)]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of an optimiser of `class_names`."""
    found: type[torch.optim.Optimizer] = getattr(torch.optim, name, None) or plugins("optimizers")[name].load()
    return found


def arguments_of(name: str) -> set[str]:
    """Names of the hyper-parameters of an optimiser."""
    return set(inspect.signature(optimizer_class(name)).parameters) - FLAGS - {"params"}


@naming
def read_optimizer_state(path: Path, *, trust_pickle: bool = False) -> OptimizerState:
    """The state of the optimiser in a checkpoint, or in `optimizer.pt` beside its weights, as transformers writes it.

    Args:
        path: the checkpoint: a file, an index of shards, or a Hugging Face folder; or a file with the state alone.
        trust_pickle: as for `read_checkpoint`.

    Raises:
        NoOptimizerState: there is none.
        ValueError: a file is damaged or holds code, or the state has another form.
    """
    folder = path if path.is_dir() else path.parent
    beside = [folder / name for name in BESIDE if (folder / name).is_file() and folder / name != path]
    content = {} if path.is_dir() or path.name.endswith(".json") else file_formats.load(path, trust_pickle=trust_pickle)
    content = content if isinstance(content, Mapping) else {}
    if found := _found(path, content):
        return found
    for file in beside:
        if found := _found(file, file_formats.load(file, trust_pickle=trust_pickle)):
            return found
    near = f", nor {alternatives(BESIDE)} beside it" if not beside else f", nor {beside[0].name} beside it"
    keys = ", ".join(printable(key)[:40] for key in list(content)[:6])
    raise NoOptimizerState(
        f"{path} holds no optimiser state: it has no entry {alternatives(ENTRIES)}"
        f"{f' (its keys: {keys})' if keys else ''}{near}; {NEEDED}"
    )


def _found(path: Path, content: Any) -> OptimizerState | None:
    """The state in the content of a file; None where there is none.

    Raises:
        ValueError: an entry has the name and not the form of a state.
    """
    if not isinstance(content, Mapping):
        return None
    scaled = any(str(name).startswith(SCALERS) for name in [*content, *content.get("callbacks", ())])
    if _is_state(content):
        return _checked(path, "the file itself", content, scaled)
    for name in ENTRIES:
        value = content.get(name)
        if value is None or value == []:
            continue
        value = value.state_dict() if isinstance(value, torch.optim.Optimizer) else value  # of a trusted pickle
        if isinstance(value, list | tuple):
            if len(value) > 1:
                raise ValueError(
                    f"{path} holds the states of {len(value)} optimisers under {name}, expected one; save the one of "
                    "the measured network as the entry `optimizer`"
                )
            name, value = f"{name}[0]", value[0]
        if not _is_state(value):
            keys = ", ".join(printable(k)[:20] for k in list(value)[:4]) if isinstance(value, Mapping) else ""
            got = f"a dict of {keys}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(
                f"{path} holds {got} under {name}, expected torch's optimizer."
                "state_dict(): state and param_groups; save that, or name an optimiser with --no-optimizer-state"
            )
        return _checked(path, name, value, scaled)
    return None


def _is_state(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    if not isinstance(groups, list | tuple) or not groups:
        return False
    known = all(isinstance(g, Mapping) and isinstance(g.get("params"), list | tuple) and "lr" in g for g in groups)
    return known and all(isinstance(entries, Mapping) for entries in value["state"].values())


def _checked(path: Path, taken: str, value: Mapping[str, Any], scaled: bool) -> OptimizerState:
    found = OptimizerState(path, taken, tuple(value["param_groups"]), value["state"], scaled)
    keys: Iterable[object] = found.keys
    if not all(isinstance(key, int | str) for key in keys) or len(set(keys)) < len(found.keys):
        raise ValueError(
            f"{path} names the parameters of its optimiser state twice, or not by position or name; save it again"
        )
    for name, given in chain.from_iterable(group.items() for group in found.groups):
        if not any(_is_like(given, default) for default in _defaults().get(name, {None})):
            raise ValueError(
                f"{path} holds {name} = {printable(repr(given))[:40]} of its optimiser, expected numbers such as "
                f"{max(map(str, _defaults()[name]))}; save its state again"
            )
    for entries in found.state.values():
        if not _is_like(entries.get("step", 0), 0):
            raise ValueError(
                f"{path} holds {printable(repr(entries['step']))[:40]} steps of its optimiser, expected a number; save "
                "its state again"
            )
    tensors = {f"{key}.{name}": v for key, name, v in found._entries() if isinstance(v, Tensor)}
    checkpoint.check_tensors(path, tensors, sum(raw_files.files_of(path).values()))
    return found

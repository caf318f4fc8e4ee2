"""Rebuild an optimiser, that of a checkpoint or one of torch.optim, over copies of a model's parameters, and ask it."""

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from landscape.checkpoints import optimizer_state, parameter_groups
from landscape.options import OptionError, did_you_mean, invalid, parse_arguments
from landscape.subject.optimizer_rules import PLAIN, Together, name_of, parts_of, rule_of
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

OPTIMIZER_HELP = "optimiser of torch.optim, such as sgd or AdamW; default: the one whose state the checkpoint holds"
OPTIMIZER_ARG_HELP = "KEY=VALUE argument of the optimiser, such as lr=0.1, in place of the checkpoint's; repeatable"
OPTIMIZER_STATE_HELP = "use the state in the checkpoint; without it --optimizer starts anew"
NO_UPDATE = {
    "LBFGS": "evaluates the loss again and again within a step (a closure), so that it has no update of one gradient",
    "SparseAdam": "takes sparse gradients alone, and the gradients of a measurement are dense",
}


@dataclass(frozen=True)
class OptimizerOptions:
    """Which optimiser is meant: that of the checkpoint, or a class of torch.optim with its arguments."""

    name: str = ""  # of the class, in any case; "" for that of the state
    arguments: tuple[str, ...] = ()  # KEY=VALUE, in place of the state's
    state: bool = True  # use the state in the checkpoint

    def __post_init__(self) -> None:
        if not self.name:
            if not self.state:
                raise OptionError("--no-optimizer-state needs a new optimiser; give --optimizer sgd or another")
            return
        if self.kind not in optimizer_state.class_names():
            known = ", ".join(name for name in optimizer_state.class_names() if name not in NO_UPDATE)
            raise OptionError(
                f"--optimizer must be {known}; got {self.name}{did_you_mean(self.name, optimizer_state.class_names())}"
            )
        refuse_without_update(self.kind)
        checked_arguments(self.kind, self.changed(self.kind))

    @property
    def kind(self) -> str:
        """The name of the class as torch spells it."""
        return {name.lower(): name for name in optimizer_state.class_names()}.get(self.name.lower(), self.name)

    def changed(self, kind: str) -> dict[str, Any]:
        """The arguments by name. Raises OptionError: the class has no such argument."""
        known = (optimizer_state.arguments_of(kind) if kind else set()) | {"maximize"}
        found = parse_arguments("optimizer_arg", self.arguments)
        for name in found:
            if name not in known:
                hint = did_you_mean(name, known)
                raise OptionError(f"{kind} has no argument {name}; it has {', '.join(sorted(known))}{hint}")
        return found


def refuse_without_update(kind: str) -> None:
    """Refuse a class whose step is not an update of one dense gradient. Raises OptionError: it is such a class."""
    if kind in NO_UPDATE:
        raise OptionError(f"{kind} {NO_UPDATE[kind]}; measure another one: --no-optimizer-state --optimizer sgd")


def checked_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Refuse values that the class does not take. Raises OptionError: it does not take them."""
    try:
        optimizer_state.optimizer_class(kind)([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        given = " ".join(f"{name}={value}" for name, value in arguments.items())
        raise invalid("optimizer_arg", given, f"arguments that {kind} takes ({error})") from None


_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RestoredOptimizer:
    """An optimiser over copies of some of a model's parameters, in double precision where the device has it.

    A parameter that has no entries where others do got no gradient in the whole training: it was frozen, and is left
    out. How updates are computed (`foreach`, `fused`, `capturable`) is torch's default for a single process.
    """

    optimizer: torch.optim.Optimizer  # holds `copies`
    parameters: Mapping[str, Tensor]  # the model's own that it moves, by name, in the order of the model
    copies: Mapping[str, nn.Parameter]  # of these
    words: str  # class, hyper-parameters and state in one line
    fresh: bool  # no update has been made: the next one is its first
    left_out: tuple[str, ...] = ()  # parameters of the state that got no gradient in training

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of its groups."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def update(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The update for gradients by name, by name in the order of the model; nothing is changed.

        Raises:
            ValueError: the state lacks an entry that its hyper-parameters ask for.
        """
        names = {id(p): name for name, p in self.copies.items()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        before = [self.copies[name].detach().clone() for name in order]
        try:
            updates = rule_of(self.optimizer).update(before, [gradients[name] for name in order], self.optimizer)
        except KeyError as error:
            raise ValueError(
                f"the state of {name_of(self.optimizer)} has no entry {error}, which its arguments ask for; leave them "
                "as they were in training, or start a new optimiser: --no-optimizer-state"
            ) from None
        found = dict(zip(order, updates, strict=True))
        return {name: found[name] for name in self.parameters}


def state_of(subject: Subject, options: OptimizerOptions) -> optimizer_state.OptimizerState | None:
    """The optimiser's state in the checkpoint of a subject; None where a new optimiser is asked for, or none is there.

    Raises:
        NoOptimizerState: there is none, and no new optimiser is named.
        ValueError: see `read_optimizer_state`; the weights are a moving average.
    """
    if not options.state:
        return None
    found = _read(subject)
    if isinstance(found, optimizer_state.NoOptimizerState):
        if not options.name:
            raise found
        return None
    if subject.checkpoint is not None and subject.checkpoint.weights == "ema":
        raise ValueError(
            "the optimiser's state moves the trained weights, not their moving average; drop --weights ema, or start a "
            "new optimiser: --no-optimizer-state --optimizer sgd"
        )
    return found


def optimizer_identity(subject: Subject, options: OptimizerOptions) -> dict[str, Any]:
    """What an update depends on beside weights and data, for the `identity` of a probe."""
    state = state_of(subject, options)
    kind = _kind(options, state)
    changed = sorted((name, repr(value)) for name, value in options.changed(kind).items())
    return {"optimizer": kind, "optimizer_arg": changed, "optimizer_state": state.sha256 if state else ""}


def restored_optimizer(subject: Subject, options: OptimizerOptions) -> RestoredOptimizer:
    """The optimiser of a subject's training from the state beside its weights, or a new one.

    Raises:
        NoOptimizerState: the checkpoint holds no state, and no new optimiser is named.
        ValueError: the state is damaged, is another model's or another optimiser's, or the optimiser needs a closure or
            sparse gradients.
        OptionError: the class has no such argument, or not with this value.
    """
    state = state_of(subject, options)
    kind = _kind(options, state)
    changed = options.changed(kind)
    checked_arguments(kind, changed)
    if state is not None:
        return _with_state(subject, state, kind, changed)
    copies = {name: _copy(p) for name, p in subject.parameters.items()}
    optimizer = _built(kind, [{"params": list(copies.values())}], changed)
    return RestoredOptimizer(optimizer, subject.parameters, copies, f"{_words(optimizer)}, new", True)


def _with_state(
    subject: Subject, state: optimizer_state.OptimizerState, kind: str, changed: Mapping[str, Any]
) -> RestoredOptimizer:
    own, shapes = subject.parameters, {name: p.shape for name, p in subject.model.named_parameters()}
    named = parameter_groups.parameters_of_groups(state, {name: shapes[name] for name in own}, shapes)
    keys = dict(zip((name for names in named for name in names), state.keys, strict=True))
    moved = {n: p for n, p in own.items() if n in keys and (keys[n] in state.state or not state.state)}
    if not moved:
        raise ValueError(
            f"the optimiser state in {state.path} has no parameter that is trainable in this model; unfreeze the "
            "model, or start a new optimiser: --no-optimizer-state"
        )
    copies = {name: _copy(p) for name, p in moved.items()}
    groups = [[name for name in names if name in moved] for names in named]
    optimizer = _built(kind, [{"params": [copies[name] for name in names]} for names in groups])
    hyper = [
        {**{n: v for n, v in group.items() if n != "param_names"}, "params": names}
        for group, names in zip(state.groups, groups, strict=True)
    ]
    entries = {name: copy.deepcopy(dict(state.state[keys[name]])) for name in moved if keys[name] in state.state}
    optimizer.load_state_dict({"state": entries, "param_groups": hyper})
    if not all(group.get("train_mode", True) for group in optimizer.param_groups):
        raise ValueError(
            f"the {kind} in {state.path} was saved after eval(), beside averaged weights, which it does not move; save "
            "it after train(), or start a new optimiser: --no-optimizer-state"
        )
    for group in optimizer.param_groups:
        group |= {name: _number(value) for name, value in group.items() if name != "params"}
        group |= {name: value for name, value in PLAIN.items() if name in group}
        group |= changed
    count = f" after {state.steps:,.0f} updates" if state.steps else "" if state.state else " before any update"
    if state.scaled:
        _log.info("%s: the gradient scaler's state is not used, as the measured gradients are not scaled", state.path)
    words = f"{_words(optimizer)}, state{count} from {state.path.name}"
    left_out = tuple(name for name in keys if name in own and name not in moved)
    return RestoredOptimizer(optimizer, moved, copies, words, not state.state, left_out)


@once_per_weights
def _read(subject: Subject) -> optimizer_state.OptimizerState | optimizer_state.NoOptimizerState:
    if subject.checkpoint is None:
        return optimizer_state.NoOptimizerState(
            f"{subject.label} was not loaded from a checkpoint, and has no optimiser state; {optimizer_state.NEEDED}"
        )
    trust = subject.spec.trust_pickle if subject.spec is not None else False
    try:
        return optimizer_state.read_optimizer_state(subject.checkpoint.path, trust_pickle=trust)
    except optimizer_state.NoOptimizerState as error:
        return error.with_traceback(None)


def _kind(options: OptimizerOptions, state: optimizer_state.OptimizerState | None) -> str:
    """The class of the optimiser, which must be the state's if there is one."""
    if state is None:
        return options.kind
    names = sorted({name for group in state.groups for name in group if name != "params"})
    if not state.kind and not options.name:
        raise ValueError(
            f"the optimiser state in {state.path} ({state.taken}) does not tell its class by {', '.join(names)}; name "
            "the class of torch.optim with --optimizer, such as --optimizer AdamW"
        )
    refuse_without_update(state.kind)
    decoupled = any("decoupled_weight_decay" in group for group in state.groups)
    alike = {options.kind, state.kind} == {"Adam", "AdamW"} and not decoupled
    kind = "" if options.name and not hasattr(torch.optim, options.kind) else state.kind  # a guess among torch's
    lacking = optimizer_state.arguments_of(options.kind) - set(names) if options.name and not kind else set()
    if (options.name and kind not in ("", options.kind) and not alike) or lacking:
        got = f"of {kind}" if kind else f"one of {', '.join(names)}"
        raise ValueError(
            f"the optimiser state in {state.path} ({state.taken}) is {got}, not of {options.kind}; drop --optimizer, "
            "or start a new one: --no-optimizer-state"
        )
    return options.kind if options.name else state.kind


def _copy(parameter: Tensor) -> nn.Parameter:
    """A parameter in double precision, where rounding hides no part of a small update."""
    return nn.Parameter(parameter.detach().to(torch.float64, copy=True))


def _built(
    kind: str, groups: Iterable[dict[str, Any]], arguments: Mapping[str, Any] | None = None
) -> torch.optim.Optimizer:
    """The optimiser; beside one that takes matrices alone, such as Muon, AdamW with its defaults moves the rest."""
    given, make, arguments = list(groups), optimizer_state.optimizer_class(kind), arguments or {}
    try:
        made = make([{**group} for group in given], **arguments)  # which writes its defaults into them
        getattr(made, "train", bool)()  # schedule-free ones step in this mode alone
        return made
    except ValueError as error:
        matrices, rest = (
            [{**g, "params": own} for g in given if (own := [p for p in g["params"] if (p.ndim == 2) == matrix])]
            for matrix in (True, False)
        )
        if not matrices or not rest:
            raise ValueError(
                f"{kind} does not take this model's parameters ({error}); name another --optimizer"
            ) from None
        return Together(_built(kind, matrices, arguments), torch.optim.AdamW(rest))


def _number(value: Any) -> Any:
    """A hyper-parameter as a number where it is a tensor of one, as a learning rate may be."""
    if isinstance(value, tuple | list):
        return type(value)(_number(part) for part in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _words(optimizer: torch.optim.Optimizer) -> str:
    """The class and its hyper-parameters, with all values where groups differ."""
    parts = parts_of(optimizer)
    if len(parts) > 1:
        return " + ".join(map(_words, parts))
    known = optimizer_state.arguments_of(type(optimizer).__name__)
    values: dict[str, list[Any]] = {}
    for group in optimizer.param_groups:
        for name in group:
            if name in known and group[name] not in values.setdefault(name, []):
                values[name].append(group[name])
    shown = ", ".join(f"{name}={' or '.join(map(str, found))}" for name, found in values.items())
    return f"{type(optimizer).__name__}({shown})"

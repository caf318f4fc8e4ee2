"""The options that say which optimiser is meant: that of a checkpoint, or a class of torch.optim with its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from landscape.checkpoints.optimizer_state import arguments_of, class_names, optimizer_class
from landscape.options import OptionError, did_you_mean, invalid, parse_arguments

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
        if self.kind not in class_names():
            known = ", ".join(name for name in class_names() if name not in NO_UPDATE)
            raise OptionError(f"--optimizer must be {known}; got {self.name}{did_you_mean(self.name, class_names())}")
        refuse_without_update(self.kind)
        checked_arguments(self.kind, self.changed(self.kind))

    @property
    def kind(self) -> str:
        """The name of the class as torch spells it."""
        return {name.lower(): name for name in class_names()}.get(self.name.lower(), self.name)

    def changed(self, kind: str) -> dict[str, Any]:
        """The arguments by name.

        Raises:
            OptionError: the class has no such argument.
        """
        known = (arguments_of(kind) if kind else set()) | {"maximize"}
        found = parse_arguments("optimizer_arg", self.arguments)
        for name in found:
            if name not in known:
                hint = did_you_mean(name, known)
                raise OptionError(f"{kind} has no argument {name}; it has {', '.join(sorted(known))}{hint}")
        return found


def refuse_without_update(kind: str) -> None:
    """Refuse a class whose step is not an update of one dense gradient.

    Raises:
        OptionError: it is such a class.
    """
    if kind in NO_UPDATE:
        raise OptionError(f"{kind} {NO_UPDATE[kind]}; measure another one: --no-optimizer-state --optimizer sgd")


def checked_arguments(kind: str, arguments: Mapping[str, Any]) -> None:
    """Refuse values that the class does not take.

    Raises:
        OptionError: it does not take them.
    """
    try:
        optimizer_class(kind)([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        given = " ".join(f"{name}={value}" for name, value in arguments.items())
        raise invalid("optimizer_arg", given, f"arguments that {kind} takes ({error})") from None

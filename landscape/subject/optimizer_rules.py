"""What is known of an optimiser: its update, the norm of its steps, its preconditioner and stability threshold.

An optimiser is recognised by its hyper-parameters and the entries of its state, not by its class, so that a variant of
another package with those of Adam is Adam. A class may bring a `Rule` of its own as its attribute `landscape_rule`,
also one that a package adds by an entry point of `landscape.optimizers`. Where no threshold is known there is none.
"""

import copy
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Group: TypeAlias = Mapping[str, Any]  # options of a parameter group
State: TypeAlias = Mapping[str, Any]  # an optimiser's state of one parameter
Stability: TypeAlias = Callable[[Group, State], tuple[Any, float]]  # -> diagonal of P, eta times the threshold
Update: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], Optimizer], list[Tensor]]
Norm = Literal["euclidean", "elementwise", "spectral"]


class Together(Optimizer):
    """Several optimisers of one model as one, such as Muon for matrices and AdamW for the rest."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = ChainMap(*(part.state for part in parts))  # type: ignore[assignment]
        self.defaults = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def step(self, closure: Any = None) -> Any:
        """Make the update of each."""
        for part in self.parts:
            part.step(closure)


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """The optimisers that one stands for: itself, or several."""
    return optimizer.parts if isinstance(optimizer, Together) else (optimizer,)


def name_of(optimizer: Optimizer) -> str:
    """The class, or the classes, of an optimiser."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


def own_step(parameters: Sequence[Tensor], gradients: Sequence[Tensor], state: Optimizer) -> list[Tensor]:
    """The update that a copy of the optimiser makes; the optimiser, its parameters and gradients stay as they are."""
    trial = copy.deepcopy(state)
    moved = [p for group in trial.param_groups for p in group["params"]]
    for p, gradient in zip(moved, gradients, strict=True):
        p.grad = gradient.detach().to(p.device, p.dtype).clone()
    trial.step()
    return [p.detach() - start for p, start in zip(moved, parameters, strict=True)]


@dataclass(frozen=True)
class Rule:
    """What is known of the optimisers with these hyper-parameters and entries."""

    name: str
    options: frozenset[str]  # hyper-parameters that it has
    entries: frozenset[str]  # of its state, after an update
    optional: frozenset[str] = frozenset()  # entries that it may have beside them
    stability: Stability | None = None  # diagonal of P and eta times the threshold; None: no threshold is known
    definition: str = ""  # of both in words
    norm: Norm = "euclidean"  # in which its steps are bounded
    update: Update = own_step  # (parameters, gradients, optimiser) -> step, each in the order of the groups

    def fits(self, options: Mapping[str, Any], state: State) -> bool:
        """Whether an optimiser with these hyper-parameters and this state of a parameter, maybe none yet, is one."""
        entries = state.keys()
        return self.options <= options.keys() and (
            not entries or self.entries <= entries <= self.entries | self.optional
        )


def rule_of(optimizer: Optimizer, state: State | None = None) -> Rule:
    """What is known of an optimiser that is one, by its state of a parameter; nothing of one that is not recognised."""
    own = getattr(optimizer, "landscape_rule", None)
    if isinstance(own, Rule):
        return own
    held: State = next(iter(optimizer.state.values()), {}) if state is None else state
    unknown = Rule(type(optimizer).__name__, frozenset(), frozenset())
    return next((rule for rule in RULES if rule.fits(optimizer.defaults, held)), unknown)


def length_in(norm: Norm, step: Tensor) -> float:
    """The norm of the step of one tensor; elementwise is the largest entry, spectral the largest singular value."""
    if norm == "elementwise":
        return float(step.abs().max())
    if norm == "spectral" and step.ndim > 1:
        return float(torch.linalg.matrix_norm(step.flatten(1).double(), 2))
    return float(torch.linalg.vector_norm(step.double()))


def step_norm(optimizer: Optimizer | None, held: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> float:
    """The norm of a step in that of its optimiser: the largest over tensors that have another than the Euclidean."""
    parts = () if optimizer is None else parts_of(optimizer)
    norms = {id(p): rule_of(part).norm for part in parts for g in part.param_groups for p in g["params"]}
    euclidean, largest = 0.0, 0.0
    for name, own in step.items():
        norm = norms.get(id(held[name]), "euclidean")
        length = length_in(norm, own)
        euclidean, largest = (
            (euclidean + length**2, largest) if norm == "euclidean" else (euclidean, max(largest, length))
        )
    return float(max(euclidean**0.5, largest))


def _sgd(group: Group, _: State) -> tuple[Any, float]:
    beta = float(group["momentum"])
    if group["nesterov"]:
        return 1.0, (2 + 2 * beta) / (1 + 2 * beta)
    return 1.0, (2 + 2 * beta) / (1 - float(group["dampening"]) if beta else 1.0)


def _adam(group: Group, state: State) -> tuple[Any, float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = float(state["step"])
    second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double()
    diagonal = (1 - beta1**step) * ((second / (1 - beta2**step)).sqrt() + group["eps"])
    return diagonal, (2 + 2 * beta1) / (1 - beta1)


def _adamax(group: Group, state: State) -> tuple[Any, float]:
    beta1 = float(group["betas"][0])
    return (1 - beta1 ** float(state["step"])) * state["exp_inf"].double(), (2 + 2 * beta1) / (1 - beta1)


def _rmsprop(group: Group, state: State) -> tuple[Any, float]:
    second = state["square_avg"].double()
    if group["centered"]:
        second = (second - state["grad_avg"].double().square()).clamp(min=0)
    return second.sqrt() + group["eps"], 2 + 2 * float(group["momentum"])


def _adagrad(group: Group, state: State) -> tuple[Any, float]:
    shrunk = 1 + (float(state["step"]) - 1) * float(group["lr_decay"])  # the rate that lr_decay has left of lr
    return state["sum"].double().sqrt() + group["eps"], 2.0 * shrunk


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ADAM = "P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), threshold (2 + 2 beta1) / ((1 - beta1) lr)"
_NESTEROV = "(2 + 2 beta) / ((1 + 2 beta) lr) with Nesterov's"
RULES: Sequence[Rule] = (
    Rule("SGD", _names("momentum dampening nesterov"), _names(""), _names("momentum_buffer"), _sgd,
         f"P = 1, threshold 2 / lr, (2 + 2 beta) / ((1 - dampening) lr) with momentum beta, {_NESTEROV}"),
    Rule("Adam", _names("betas eps amsgrad"), _names("step exp_avg exp_avg_sq"), _names("max_exp_avg_sq"), _adam,
         f"{_ADAM}, times (1 - lr lambda / 2) with decoupled weight decay lambda"),
    Rule("Adamax", _names("betas eps"), _names("step exp_avg exp_inf"), _names(""), _adamax,
         "P = (1 - beta1^t) u, u the largest decayed gradient, threshold (2 + 2 beta1) / ((1 - beta1) lr)"),
    Rule("RMSprop", _names("alpha eps momentum centered"), _names("step square_avg"),
         _names("grad_avg momentum_buffer"), _rmsprop,
         "P = sqrt(v) + eps, threshold (2 + 2 beta) / lr with momentum beta"),
    Rule("Adagrad", _names("lr_decay initial_accumulator_value eps"), _names("step sum"), _names(""), _adagrad,
         "P = sqrt(sum of squared gradients) + eps, threshold 2 / lr, lr with its lr_decay"),
    Rule("Muon", _names("momentum nesterov ns_steps"), _names("momentum_buffer"), norm="spectral"),
    Rule("Lion", _names("betas"), _names("exp_avg"), norm="elementwise"),
)  # fmt: skip

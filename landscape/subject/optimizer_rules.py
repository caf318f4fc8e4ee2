"""What is known of an optimiser: its update, the norm of its steps, its preconditioner and stability threshold.

An optimiser is recognised by its behaviour, not by its class or the names in it: a few steps of it on small parameters,
with its hyper-parameters, are compared with those of PyTorch's optimisers. A class may bring a `Rule` of its own as its
attribute `landscape_rule`, also one that a package adds by an entry point of `landscape.optimizers`. Where nothing
matches, as of LARS beside SGD and LAMB beside Adam, no threshold is known.
"""

import copy
import inspect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Group: TypeAlias = Mapping[str, Any]  # options of a parameter group
State: TypeAlias = Mapping[str, Any]  # an optimiser's state of one parameter
Stability: TypeAlias = Callable[[Group, State], tuple[Any, float]]  # -> diagonal of P, eta times the threshold
Update: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor], Optimizer], list[Tensor]]
Norm = Literal["euclidean", "elementwise", "spectral"]
# How an update is computed, and not which: torch's defaults for a single process on the CPU.
PLAIN: Mapping[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


class Together(Optimizer):
    """Several optimisers of one model as one, such as Muon for matrices and AdamW for the rest."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state = ChainMap(*(part.state for part in parts))  # type: ignore[assignment]
        self.defaults = {}

    def step(self, closure: Any = None) -> Any:
        """Make the update of each."""
        for part in self.parts:
            part.step(closure)


def parts_of(optimizer: Optimizer | None) -> Sequence[Optimizer]:
    """The optimisers that one stands for: itself, several, or none."""
    return optimizer.parts if isinstance(optimizer, Together) else () if optimizer is None else (optimizer,)


def name_of(optimizer: Optimizer) -> str:
    """The class, or the classes, of an optimiser."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


def copied(optimizer: Optimizer, memo: dict[int, Any] | None = None) -> Optimizer:
    """A deep copy with all attributes, of which `copy.deepcopy` keeps three; without hooks and wrappers of `step`."""
    memo = {} if memo is None else memo
    if isinstance(optimizer, Together):
        return Together(*(copied(part, memo) for part in optimizer.parts))
    made = object.__new__(type(optimizer))
    kept = {name: value for name, value in vars(optimizer).items() if name != "step" and "hook" not in name}
    made.__setstate__(copy.deepcopy(kept, memo))
    return made


def own_step(parameters: Sequence[Tensor], gradients: Sequence[Tensor], state: Optimizer) -> list[Tensor]:
    """The update that a copy of the optimiser makes; the optimiser, its parameters and gradients stay as they are."""
    trial = copied(state)
    moved = [p for group in trial.param_groups for p in group["params"]]
    for p, gradient in zip(moved, gradients, strict=True):
        p.grad = gradient.detach().to(p.device, p.dtype).clone()
    trial.step()
    return [p.detach() - start for p, start in zip(moved, parameters, strict=True)]


@dataclass(frozen=True)
class Rule:
    """What is known of an optimiser."""

    name: str
    entries: frozenset[str] = frozenset()  # of its state, after an update
    stability: Stability | None = None  # diagonal of P and eta times the threshold; None: no threshold is known
    definition: str = ""  # of both in words
    norm: Norm = "euclidean"  # in which its steps are bounded
    update: Update = own_step  # (parameters, gradients, optimiser) -> step, each in the order of the groups
    decoupled: bool = False  # weight decay is taken from the weights, and is no part of the gradient


_known: WeakKeyDictionary[Optimizer, Rule] = WeakKeyDictionary()


def rule_of(optimizer: Optimizer) -> Rule:
    """What is known of an optimiser that is one; neither it nor the global random generators are changed."""
    own = getattr(optimizer, "landscape_rule", None)
    if isinstance(own, Rule):
        return own
    if optimizer not in _known:
        with torch.random.fork_rng(devices=[]):
            _known[optimizer] = _recognised(optimizer)
    return _known[optimizer]


def _recognised(optimizer: Optimizer) -> Rule:
    nothing = Rule(name_of(optimizer))
    if isinstance(optimizer, Together):
        return nothing
    try:
        steps, entries = _tried(made := _small(optimizer), DECAY)
        norm = _norm(_tried(_small(optimizer), 0.0)[0])
    except Exception:  # whatever one raises that needs a closure, other shapes or a mode of its own
        return nothing
    for make, rule in RULES.items():
        for decoupled in (False, True):
            try:
                reference = _like(make, made)
                expected, theirs = _tried(reference, 0.0 if decoupled else DECAY, shrink=DECAY if decoupled else 0.0)
            except Exception:  # of hyper-parameters of the same name that mean something else
                continue
            known = all(map(_same, steps, expected)) and all(
                own.keys() >= rule.entries and all(_same(own[name], its[name]) for name in rule.entries)
                for own, its in zip(entries, theirs, strict=True)
            )
            if known:
                assert rule.stability is not None
                stability = partial(_filled, rule.stability, reference.defaults)
                return replace(rule, stability=stability, decoupled=decoupled)
    return replace(nothing, norm=norm)


TRIALS = 12  # steps, beyond the period of a slow copy of the weights (Lookahead's 5 or 6)
RATE, DECAY = 0.1, 0.1  # learning rate and weight decay in them
SHAPES = {False: (4, 3), True: (5,)}  # of a matrix, which stands for all tensors with more axes too, and a vector


def _small(optimizer: Optimizer) -> Optimizer:
    """A copy with small parameters, a matrix or a vector or both in each group, and the state of a new optimiser."""
    memo: dict[int, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        small = {vector: nn.Parameter(torch.zeros(SHAPES[vector], dtype=torch.float64))
                 for vector in sorted({p.ndim < 2 for p in group["params"]})}  # fmt: skip
        memo |= {id(p): small[p.ndim < 2] for p in group["params"]}
        options = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        plain = {name: value for name, value in PLAIN.items() if name in group}
        groups.append({**options, **plain, "params": [*small.values()]})
    try:
        state = type(optimizer)([{**group} for group in groups]).state  # type: ignore[call-arg]
    except Exception:  # a class with further arguments
        state = defaultdict(dict)
    return copied(optimizer, memo | {id(optimizer.param_groups): groups, id(optimizer.state): state})


def _like(make: Callable[..., Optimizer], small: Optimizer) -> Optimizer:
    """An optimiser of PyTorch with the hyper-parameters of another one that it has too."""
    options = set(inspect.signature(make).parameters) - {"decoupled_weight_decay", *PLAIN}
    groups = ({name: v for name, v in group.items() if name in options | {"params"}} for group in small.param_groups)
    return make([{**group, "params": [nn.Parameter(p.detach()) for p in group["params"]]} for group in groups])


def _tried(optimizer: Optimizer, decay: float, *, shrink: float = 0.0) -> tuple[list[Tensor], list[State]]:
    """The steps of a small optimiser, and its state of each parameter.

    Gradients have norms decades apart and turning signs, so that ratios of norms, clipping and masks show; `shrink` is
    a decoupled weight decay in place of its own.
    """
    generator, double = torch.Generator().manual_seed(0), torch.float64
    for group in optimizer.param_groups:
        group |= {"lr": RATE} | ({"weight_decay": decay} if "weight_decay" in group else {})
    moved, steps = [p for group in optimizer.param_groups for p in group["params"]], []
    for p in moved:
        p.data = torch.randn(p.shape, generator=generator, dtype=double)
    for k in range(TRIALS):
        before = [p.detach().clone() for p in moved]
        for p in moved:
            p.data = p.data * (1 - RATE * shrink)
            p.grad = 10.0 ** (k % 4 - 2) * torch.randn(p.shape, generator=generator, dtype=double)
        optimizer.step()
        steps += [p.detach() - start for p, start in zip(moved, before, strict=True)]
    return steps, [optimizer.state[p] for p in moved]


def _same(one: Any, other: Any) -> bool:
    return torch.as_tensor(one).double().allclose(torch.as_tensor(other).double())


def _filled(stability: Stability, defaults: Group, group: Group, state: State) -> tuple[Any, float]:
    """The stability where a group lacks options of PyTorch's optimiser, which its behaviour says are the defaults."""
    return stability({**defaults, **group}, state)


def _norm(steps: Sequence[Tensor]) -> Norm:
    """The norm in which all steps without weight decay have the same length, as those along signs have."""
    sizes = torch.cat([step.abs().flatten() for step in steps])
    if bool(sizes.min() > 0.99 * sizes.max()):
        return "elementwise"
    values = [torch.linalg.svdvals(step) for step in steps if step.ndim == 2]
    spectral = bool(values) and all(bool(own.min() > 0.5 * own.max() > 0) for own in values)
    return "spectral" if spectral else "euclidean"


def length_in(norm: Norm, step: Tensor) -> float:
    """The norm of the step of one tensor; elementwise is the largest entry, spectral the largest singular value."""
    if norm == "elementwise":
        return float(step.abs().max())
    if norm == "spectral" and step.ndim > 1:
        return float(torch.linalg.matrix_norm(step.flatten(1).double(), 2))
    return float(torch.linalg.vector_norm(step.double()))


def step_norm(optimizer: Optimizer | None, held: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> float:
    """The norm of a step in that of its optimiser: the largest over tensors that have another than the Euclidean."""
    norms = {id(p): rule_of(one).norm for one in parts_of(optimizer) for g in one.param_groups for p in g["params"]}
    tensors = [(norms.get(id(held[name]), "euclidean"), own) for name, own in step.items()]
    squares = sum(length_in(norm, own) ** 2 for norm, own in tensors if norm == "euclidean")
    others = (length_in(norm, own) for norm, own in tensors if norm != "euclidean")
    return float(max(squares**0.5, max(others, default=0.0)))


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


_ADAM = "P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), threshold (2 + 2 beta1) / ((1 - beta1) lr)"
_NESTEROV = "(2 + 2 beta) / ((1 + 2 beta) lr) with Nesterov's"
RULES: Mapping[Callable[..., Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        "SGD", frozenset(), _sgd,
        f"P = 1, threshold 2 / lr, (2 + 2 beta) / ((1 - dampening) lr) with momentum beta, {_NESTEROV}"),
    torch.optim.Adam: Rule(
        "Adam", frozenset({"step", "exp_avg", "exp_avg_sq"}), _adam,
        f"{_ADAM}, times (1 - lr lambda / 2) with decoupled weight decay lambda"),
    torch.optim.Adamax: Rule(
        "Adamax", frozenset({"step", "exp_avg", "exp_inf"}), _adamax,
        "P = (1 - beta1^t) u, u the largest decayed gradient, threshold (2 + 2 beta1) / ((1 - beta1) lr)"),
    torch.optim.RMSprop: Rule(
        "RMSprop", frozenset({"step", "square_avg"}), _rmsprop,
        "P = sqrt(v) + eps, threshold (2 + 2 beta) / lr with momentum beta"),
    torch.optim.Adagrad: Rule(
        "Adagrad", frozenset({"step", "sum"}), _adagrad,
        "P = sqrt(sum of squared gradients) + eps, threshold 2 / lr, lr with its lr_decay"),
}  # fmt: skip

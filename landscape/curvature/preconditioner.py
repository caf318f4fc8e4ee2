"""The preconditioner of an optimiser's state, and the curvature at which that optimiser becomes unstable.

On a quadratic with Hessian H, an optimiser with learning rate eta and a constant diagonal preconditioner P diverges
where the largest eigenvalue of P^-1/2 H P^-1/2, the preconditioned sharpness, exceeds a threshold:

    gradient descent                 2 / eta
    heavy ball                       (2 + 2 beta) / ((1 - dampening) eta)
    Nesterov                         (2 + 2 beta) / ((1 + 2 beta) eta)
    RMSprop, Adagrad                 2 / eta, with momentum as heavy ball
    Adam, AdamW                      (2 + 2 beta1) / ((1 - beta1) eta)

(Cohen et al., arXiv 2103.00065, for the first three; arXiv 2207.14484 for preconditioned ones, (2 + 2 beta1) / ((1 -
beta1) eta) for Adam). P is that of the last update. As in the published code of arXiv 2207.14484, both bias corrections
of Adam belong to it: P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), with amsgrad's maximum in the place of v.

Weight decay that is added to the gradient belongs to H, on the diagonal. Decoupled weight decay lambda does not; it
multiplies the threshold by 1 - eta lambda / 2, which is exact: the update first crosses to divergence at the root
z = -1 of w+ = (1 - eta lambda) w - eta P^-1 m, m+ = beta1 m + (1 - beta1) H w.

Parameters of several groups, with a threshold of their own each, become unstable where the largest eigenvalue of
(T P)^-1/2 H (T P)^-1/2 exceeds 1, T the diagonal matrix of thresholds; this is exact too. It is stated with the
threshold of one group, that of the most parameters, and P of the others times the ratio of the thresholds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from landscape.products.vectors import flat

Group: TypeAlias = Mapping[str, Any]  # options of a parameter group
State: TypeAlias = Mapping[str, Any]  # an optimiser's state of one parameter
Rule: TypeAlias = Callable[[Group, State], tuple[Any, float]]  # -> diagonal of P, eta times the threshold


class NoUpdateYet(ValueError):
    """An optimiser moves no parameter so far: it has made no update, or its learning rate is 0."""


@dataclass(frozen=True)
class Preconditioner:
    """A diagonal preconditioner P and the stability threshold of the optimiser that has it."""

    optimizer: str  # name of the class
    threshold: float  # largest stable eigenvalue of P^-1/2 H P^-1/2
    scale: Mapping[str, Tensor]  # P^-1/2 by name, of the parameters that the optimiser moves
    decay: Mapping[str, float]  # their weight decay that is added to the gradient, a part of H
    definition: str  # P and threshold in words

    def of(self, product: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
        """Products of P^-1/2 (H + decay) P^-1/2 from those of H, of vectors (n,) or of rows (M, n).

        `parameters` are those that H belongs to, which may be a part of all; P of those that do not move is infinite.
        """
        scale = flat(self.scale.get(name, torch.zeros_like(p)).to(p.device, p.dtype) for name, p in parameters.items())
        decay: Tensor | None = None
        if any(self.decay.values()):
            decay = flat(torch.full_like(p, self.decay.get(name, 0.0)) for name, p in parameters.items()).detach()

        def preconditioned(vector: Tensor) -> Tensor:
            scaled = scale * vector
            image = product(scaled)
            return scale * (image if decay is None else image + decay * scaled)

        return preconditioned


def preconditioner(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Preconditioner:
    """The preconditioner of an optimiser at its present state, for the parameters that it holds, by name.

    It does not move those that never had a gradient, nor those with learning rate 0.

    Raises:
        ValueError: no threshold is known for this optimiser or an option of it, it holds none of the parameters, has
            made no update or has no positive learning rate (`NoUpdateYet`), or no stable one.
    """
    kind = type(optimizer)
    if kind not in RULES:
        known = ", ".join(one.__name__ for one in RULES)
        raise ValueError(f"the stability threshold of {kind.__name__} is not known; those of {known} are")
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    held = {name: p for name, p in parameters.items() if id(p) in groups}
    if not held:
        raise ValueError(f"{kind.__name__} holds none of the {len(parameters)} parameters of the model")
    scale: dict[str, Tensor] = {}
    thresholds: dict[str, float] = {}
    for name, p in held.items():
        group, state = groups[id(p)], optimizer.state.get(p, {})
        if group.get("maximize"):
            raise ValueError(f"{kind.__name__} with maximize=True ascends; the threshold is that of descent")
        if float(group["lr"]) > 0 and (kind is torch.optim.SGD or _updates(state) > 0):
            diagonal, thresholds[name] = _of_parameter(name, kind, group, state, p)
            scale[name] = (diagonal * thresholds[name]).rsqrt()
    if not scale:
        still = max(float(group["lr"]) for group in optimizer.param_groups) <= 0
        why = "its learning rate is 0; give another" if still else "it has made no update; give a later checkpoint"
        raise NoUpdateYet(f"{kind.__name__} moves no parameter: {why}")
    sizes: dict[float, int] = {}
    for name, own in thresholds.items():
        sizes[own] = sizes.get(own, 0) + held[name].numel()
    threshold = max(sizes, key=lambda own: sizes[own])
    scale = {name: (threshold**0.5 * one).to(held[name].dtype) for name, one in scale.items()}
    decay = {name: _coupled_decay(kind, groups[id(held[name])]) for name in scale}
    return Preconditioner(kind.__name__, threshold, scale, decay, _definition(kind, len(sizes)))


def _of_parameter(name: str, kind: type, group: Group, state: State, p: Tensor) -> tuple[Tensor, float]:
    """Diagonal of P with the shape of the parameter, and its threshold."""
    diagonal, threshold = RULES[kind][0](group, state)
    diagonal = torch.as_tensor(diagonal, device=p.device).double().expand(p.shape)
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    threshold = threshold / rate * (1 - rate * decay / 2 if _decouples(kind, group) else 1.0)
    if threshold <= 0:
        raise ValueError(
            f"{kind.__name__} with lr {rate:g} and decoupled weight decay {decay:g} diverges by its decay alone; the "
            "product must be below 2"
        )
    if not bool((diagonal > 0).all() and diagonal.isfinite().all()):
        raise ValueError(f"the preconditioner of {name} has entries that are not positive numbers; use a larger eps")
    return diagonal, threshold


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


def _rmsprop(group: Group, state: State) -> tuple[Any, float]:
    second = state["square_avg"].double()
    if group["centered"]:
        second = (second - state["grad_avg"].double().square()).clamp(min=0)
    return second.sqrt() + group["eps"], 2 + 2 * float(group["momentum"])


def _adagrad(group: Group, state: State) -> tuple[Any, float]:
    shrunk = 1 + (_updates(state) - 1) * float(group["lr_decay"])  # the rate that lr_decay has left of lr
    return state["sum"].double().sqrt() + group["eps"], 2.0 * shrunk


def _updates(state: State) -> float:
    return float(state.get("step", 0))


def _decouples(kind: type, group: Group) -> bool:
    return kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))


def _coupled_decay(kind: type, group: Group) -> float:
    return 0.0 if _decouples(kind, group) else float(group["weight_decay"])


def _definition(kind: type, thresholds: int) -> str:
    text = f"largest eigenvalue of P^-1/2 H P^-1/2, {RULES[kind][1]}"
    if thresholds > 1:
        text += f"; P of a parameter group times its own threshold / that of the largest of {thresholds} groups"
    return text


_ADAM = "P = (1 - beta1^t) (sqrt(v / (1 - beta2^t)) + eps), threshold (2 + 2 beta1) / ((1 - beta1) lr)"
RULES: Mapping[type, tuple[Rule, str]] = {
    torch.optim.SGD: (
        _sgd, "P = 1, threshold 2 / lr, (2 + 2 beta) / ((1 - dampening) lr) with momentum beta, (2 + 2 beta) / "
        "((1 + 2 beta) lr) with Nesterov's",
    ),
    torch.optim.Adam: (_adam, _ADAM),
    torch.optim.AdamW: (_adam, f"{_ADAM} (1 - lr lambda / 2), lambda the decoupled weight decay"),
    torch.optim.RMSprop: (_rmsprop, "P = sqrt(v) + eps, threshold (2 + 2 beta) / lr with momentum beta"),
    torch.optim.Adagrad: (_adagrad, "P = sqrt(sum of squared gradients) + eps, threshold 2 / lr, lr with its lr_decay"),
}  # fmt: skip

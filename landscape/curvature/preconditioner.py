"""The preconditioner of an optimiser's state, and the curvature at which that optimiser becomes unstable.

On a quadratic with Hessian H, an optimiser with learning rate eta and a constant diagonal preconditioner P diverges
where the largest eigenvalue of P^-1/2 H P^-1/2, the preconditioned sharpness, exceeds a threshold:

    gradient descent                 2 / eta
    heavy ball                       (2 + 2 beta) / ((1 - dampening) eta)
    Nesterov                         (2 + 2 beta) / ((1 + 2 beta) eta)
    RMSprop, Adagrad                 2 / eta, with momentum as heavy ball
    Adam, AdamW, Adamax              (2 + 2 beta1) / ((1 - beta1) eta)

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

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.spectrum import Request, spectrum
from landscape.probe import Quantity, derived_seed
from landscape.products.vectors import flat
from landscape.statistics.means import finite_means
from landscape.subject import optimizers, weights_cache
from landscape.subject.optimizer_rules import RULES, Group, Rule, State, name_of, parts_of, rule_of
from landscape.subject.subject import Subject


class UnknownThreshold(ValueError):
    """No stability threshold is known for an optimiser."""


class NoUpdateYet(ValueError):
    """An optimiser moves no parameter so far: it has made no update, or its learning rate is 0."""


@dataclass(frozen=True)
class Preconditioner:
    """A diagonal preconditioner P and the stability threshold of the optimiser that has it."""

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
        ValueError: no threshold is known for it (`UnknownThreshold`), it ascends, holds none of the parameters, has
            made no update or has no positive learning rate (`NoUpdateYet`), or no stable one.
    """
    holdings = [(id(p), part, g) for part in parts_of(optimizer) for g in part.param_groups for p in g["params"]]
    if several := sum(count > 1 for count in Counter(key for key, *_ in holdings).values()):
        raise ValueError(
            f"{several} parameters are held by several optimisers ({name_of(optimizer)}), which together have no known "
            "threshold; give each parameter to one of them, or one optimiser alone"
        )
    owners = {key: (part, group) for key, part, group in holdings}
    held = {name: p for name, p in parameters.items() if id(p) in owners}
    if not held:
        raise ValueError(f"{name_of(optimizer)} holds none of the {len(parameters)} parameters of the model")
    scale: dict[str, Tensor] = {}
    thresholds: dict[str, float] = {}
    decay: dict[str, float] = {}
    definitions: dict[str, None] = {}
    for name, p in held.items():
        part, group = owners[id(p)]
        state, kind = part.state.get(p, {}), type(part)
        rule = rule_of(part)
        if rule.stability is None:
            known = ", ".join(one.name for one in RULES.values())
            raise UnknownThreshold(f"the stability threshold of {kind.__name__} is not known; those of {known} are")
        if group.get("maximize"):
            raise ValueError(f"{kind.__name__} with maximize=True ascends; the threshold is that of descent")
        if float(group["lr"]) > 0 and rule.entries <= state.keys() and float(state.get("step", 1)) > 0:
            diagonal, thresholds[name] = _of_parameter(name, kind, rule, group, state, p)
            scale[name] = (diagonal * thresholds[name]).rsqrt()
            decay[name] = 0.0 if rule.decoupled else float(group.get("weight_decay", 0.0))
            definitions[rule.definition] = None
    if not scale:
        still = max(float(group["lr"]) for group in optimizer.param_groups) <= 0
        why = "its learning rate is 0; give another" if still else "it has made no update; give a later checkpoint"
        raise NoUpdateYet(f"{name_of(optimizer)} moves no parameter: {why}")
    sizes = Counter[float]()
    for name, own in thresholds.items():
        sizes[own] += held[name].numel()
    threshold = max(sizes, key=sizes.__getitem__)
    scale = {name: (threshold**0.5 * one).to(held[name].dtype) for name, one in scale.items()}
    definition = f"{MATRIX}, {'; '.join(definitions)}"
    if len(sizes) > 1:
        definition += f"; P of a parameter group times its own threshold / that of the largest of {len(sizes)} groups"
    return Preconditioner(threshold, scale, decay, definition)


def _of_parameter(name: str, kind: type, rule: Rule, group: Group, state: State, p: Tensor) -> tuple[Tensor, float]:
    """Diagonal of P with the shape of the parameter, and its threshold."""
    assert rule.stability is not None
    diagonal, threshold = rule.stability(group, state)
    diagonal = torch.as_tensor(diagonal, device=p.device).double().expand(p.shape)
    rate, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    threshold = threshold / rate * (1 - rate * decay / 2 if rule.decoupled else 1.0)
    if threshold <= 0:
        raise ValueError(
            f"{kind.__name__} with lr {rate:g} and decoupled weight decay {decay:g} diverges by its decay alone; the "
            "product must be below 2"
        )
    if not bool((diagonal > 0).all() and diagonal.isfinite().all()):
        raise ValueError(f"the preconditioner of {name} has entries that are not positive numbers; use a larger eps")
    return diagonal, threshold


UNITS = "1 / learning rate"
MATRIX = "largest eigenvalue of P^-1/2 H P^-1/2"
SEEN = {  # the quantities of `SeenByOptimizer`
    "batch_preconditioned": Quantity(f"{MATRIX} on the mini-batch, P the optimiser's preconditioner", UNITS, ("rank",)),
    "batch_preconditioned_error": Quantity("estimated error min(r, r^2 / gap) of that eigenvalue", UNITS, ("rank",)),
    "batch_preconditioned_converged": Quantity("1 where its error is within the tolerance", dims=("rank",)),
}
STABILITY = {  # what is stored of every matrix beside its eigenvalues
    "threshold": Quantity("largest eigenvalue at which the optimiser is stable on a quadratic", UNITS),
    "ratio": Quantity("largest eigenvalue / threshold: above 1 the optimiser is unstable on a quadratic"),
    "ratio_error": Quantity("estimated error of the ratio, from that of the eigenvalue"),
}
SUMMARIES = {  # the quantities of `stability_summaries`, each over mini-batches
    "sharpness": Quantity("preconditioned sharpness: the largest eigenvalue, mean over mini-batches", UNITS),
    "stability": Quantity("preconditioned sharpness / threshold"),
}


@weights_cache.once_per_weights
def optimizer_of(subject: Subject, options: optimizers.OptimizerOptions) -> tuple[Preconditioner, str]:
    """The preconditioner of a subject's optimiser at the state beside its weights, and that optimiser in words.

    Raises:
        ValueError: as `restored_optimizer` and `preconditioner`; the subject has weight decay of its own.
    """
    if subject.weight_decay:
        raise ValueError(
            f"--weight-decay {subject.weight_decay:g} is not used with --operator preconditioned, which takes that of "
            "the optimiser; leave it out, and --preset, which sets it"
        )
    restored = optimizers.restored_optimizer(subject, options)
    return preconditioner(restored.optimizer, restored.copies), restored.words


@dataclass(frozen=True)
class SeenByOptimizer:
    """The largest eigenvalues of P^-1/2 H P^-1/2 for one optimiser, measured with products that others need too."""

    known: Preconditioner
    request: Request

    def values(
        self, product: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], shift: float, i: int
    ) -> dict[str, np.ndarray]:
        """Those of mini-batch i with their errors, (rank,) each; NaN where the matrix is not finite.

        `product` is v -> H v + shift v in the parameters; the shift is left out, as the optimiser has its own decay.
        """
        own = next(iter(parameters.values()))
        size = sum(p.numel() for p in parameters.values())
        matrix = self.known.of(lambda v: product(v) - shift * v if shift else product(v), parameters)
        seed = derived_seed(0, "preconditioned", i)
        try:
            found = spectrum(matrix, self.request.capped(size), size, seed, own)
        except FloatingPointError:
            return {name: np.full(self.request.top, np.nan) for name in SEEN}
        lacking = (0, self.request.top - len(found.values))
        parts = (found.values, found.errors, found.converged.astype(float))
        return {n: np.pad(p, lacking, constant_values=np.nan) for n, p in zip(SEEN, parts, strict=True)}


ENDS = 1e-2  # relative residual of the largest eigenvalue, which may be none of the largest by magnitude


def stability_values(values: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """The values of `STABILITY` of one matrix, from those of its spectrum; the ratio is NaN where that is not finite.

    A positive one of the wanted eigenvalues holds the largest of all among them. Where the largest by magnitude are all
    negative, it is the largest Ritz value, whose residual `ENDS` bounds.
    """
    eigenvalues, error = np.append(values["eigenvalue"], -np.inf), np.append(values["error"], np.nan)
    at = int(np.nanargmax(eigenvalues))
    largest, off = eigenvalues[at], error[at]
    if not largest > 0:
        largest, off = values["largest"], values["largest_residual"]
    return {"threshold": threshold, "ratio": largest / threshold, "ratio_error": off / threshold}


def stability_summaries(data: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Mean of the largest eigenvalue over finished mini-batches, also as a share of the threshold; of each layer."""
    mean, error, count = finite_means(np.where(data["done"] == 1, data["ratio"], np.nan))
    thresholds = data["threshold"][np.isfinite(data["threshold"])]
    threshold = thresholds[0] if thresholds.size else np.nan
    return {
        "sharpness": mean * threshold, "sharpness_se": error * threshold, "stability": mean, "stability_se": error,
        "sharpness_se.n": count, "stability_se.n": count,
    }  # fmt: skip

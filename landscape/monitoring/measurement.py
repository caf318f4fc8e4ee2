"""What is measured at one step of a run, on its mini-batch and at the present weights."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.fx.experimental.symbolic_shapes  # the first double backward imports it: longer than a row
from torch import Tensor
from torch.optim import Optimizer

from landscape.curvature.lanczos import Spectrum, lanczos
from landscape.curvature.preconditioner import NoUpdateYet, UnknownThreshold, preconditioner
from landscape.curvature.spectrum import memory
from landscape.monitoring import budget, followed_model
from landscape.monitoring.gradients import Start, gradients_of, gram, noise, parts_of
from landscape.monitoring.shards import own_parts
from landscape.probe import derived_seed
from landscape.products.operator import Curvature
from landscape.products.vectors import dot, flat, length, random_unit, unflat
from landscape.subject import restoration
from landscape.subject.losses import loss_gradients
from landscape.subject.optimizer_rules import Together, step_norm
from landscape.subject.subject import Subject


def optimizer_in_use(found: Any) -> Optimizer | None:
    """The optimiser of PyTorch behind a library's wrapper, or several as one; None where one of these is none."""
    if isinstance(found, list | tuple):
        parts = [*map(optimizer_in_use, found)]
        known = [one for one in parts if one is not None]
        return None if len(known) < len(parts) else Together(*known) if len(known) > 1 else next(iter(known), None)
    while (inner := getattr(found, "optimizer", None)) is not None:
        found = inner
    return found if isinstance(found, Optimizer) else None


NEXT, RANDOM = 0.3, 0.3  # lengths of the next Ritz vector and of a random one in a start from the last eigenvectors
UNSURE = 100.0  # so much larger a hidden component may be than in a search from a random start: one standard deviation


@dataclass(frozen=True)
class Found:
    """The largest eigenvalues, in descending order."""

    values: np.ndarray  # (k,)
    residuals: np.ndarray  # ||H v - lambda v||, (k,)
    errors: np.ndarray  # estimated errors min(r, r^2 / gap) of the values, (k,)
    converged: np.ndarray  # (k,)
    warm_error: float  # where checked: share of the largest by which the search from the last vectors missed it
    products: int


@dataclass
class TrackedEigenvalues:
    """Searches for the k algebraically largest eigenvalues of one matrix after the other.

    A search begins with the sum of the last eigenvectors, a part of the next Ritz vector, whose value may have become
    the largest, and a random part. It ends only when that part makes it unlikely that an eigenvalue further out is
    hidden (`stopping.StoppingRule`): from the last eigenvectors alone it would end there, with a small residual, also
    when several others have overtaken them, as happens at the edge of stability. The first search, and every one that
    is to be checked, begins with a random vector and has to be surer; of a checked one the search from the last vectors
    is made too, and `warm_error` says by how much its largest value was off.
    """

    k: int
    tol: float  # largest estimated relative error of a value
    max_products: int
    seed: int
    _vectors: Tensor | None = field(default=None, init=False)
    _next: Tensor | None = field(default=None, init=False)  # that of the rank after them, (n,)
    _searches: int = field(default=0, init=False)

    def search(self, product: Callable[[Tensor], Tensor], like: Tensor, size: int, *, check: bool) -> Found:
        """The eigenvalues of the operator v -> H v with `size` rows, on the device and in the dtype of `like`.

        One that is not finite has NaN, and is not converged.
        """
        self._searches += 1
        drawn = random_unit(size, self.seed + self._searches, device=like.device, dtype=like.dtype)
        known = self._vectors if self._vectors is not None and self._vectors.shape[1] == size else None
        try:
            if known is None:
                return self._kept(self._lanczos(product, drawn, unseen=1.0), np.nan, 0)
            mixed = known.sum(dim=0) + RANDOM * drawn
            mixed = mixed if self._next is None else mixed.add_(self._next, alpha=NEXT)
            warm = self._lanczos(product, mixed, unseen=UNSURE * RANDOM / length(mixed).item())
            if not check:
                return self._kept(warm, np.nan, 0)
            cold = self._lanczos(product, drawn, unseen=1.0)
            top = float(cold.values[0])
            missed = (top - float(warm.values[0])) / abs(top) if top else np.nan
            return self._kept(cold if missed >= 0 else warm, missed, (warm if missed >= 0 else cold).products)
        except FloatingPointError:
            self._vectors = None
            nothing = np.full(self.k, np.nan)
            return Found(nothing, nothing, nothing, np.zeros(self.k), np.nan, 0)

    def _lanczos(self, product: Callable[[Tensor], Tensor], start: Tensor, *, unseen: float) -> Spectrum:
        room, storage = memory(start)
        k = min(self.k, start.numel())
        return lanczos(
            product, start, k, which="LA", tol=self.tol, max_steps=max(self.max_products, k + 1), room=room,
            storage=storage, vectors=True, further=1, unseen=unseen,
        )  # fmt: skip

    def _kept(self, found: Spectrum, warm_error: float, more: int) -> Found:
        """The values of a search, whose vectors the next one begins with; `more` products were made by another one."""
        assert found.vectors is not None
        self._vectors = found.vectors.clone()
        self._next = None if found.further is None else found.further[0].clone()
        lacking = (0, self.k - len(found.values))
        values, residuals, errors, converged = (
            np.pad(np.asarray(part, float), lacking, constant_values=np.nan)
            for part in (found.values, found.residuals, found.errors, found.converged)
        )
        return Found(values, residuals, errors, converged, warm_error, found.products + more)


PRODUCTS = 100  # at most, of one search
_log = logging.getLogger(__name__)


class Measurement:
    """Measures the present weights; it keeps the vectors of the last measurement, with which the next begins."""

    def __init__(
        self,
        subject: Subject,
        start: Start,
        optimizer: Optimizer | None,
        *,
        top: int,
        parts: int,
        tol: float,
        seed: int,
    ) -> None:
        self._subject, self._start, self._optimizer, self._top, self._parts = subject, start, optimizer, top, parts
        self._shapes = {name: p.shape for name, p in subject.parameters.items()}
        self._tracked = TrackedEigenvalues(top, tol, PRODUCTS, derived_seed(seed, "eigenvalues"))
        self._tracked_preconditioned = TrackedEigenvalues(top, tol, PRODUCTS, derived_seed(seed, "preconditioned"))
        self._along, self._shards = followed_model.AlongUpdate(subject, start.shards), start.shards
        self._warned = False
        if optimizer is not None and not self._shards.divided:
            with contextlib.suppress(NoUpdateYet, UnknownThreshold):
                preconditioner(optimizer, self._held)

    def before_update(self) -> None:
        """Keep the weights, along whose change by the next update is measured."""
        self._along.begin(self._held)

    def at_present(self, kind: budget.Kind, rate: float) -> dict[str, Any]:
        """The numbers of the present weights, and of the update that led there with this learning rate.

        Those of a `row` come from a gradient and forward passes, and the others, which need products with the Hessian,
        are NaN, as they are in all rows of weights that are divided among processes; `check`: eigenvalues from a random
        start too.

        Raises:
            ValueError: the model has no second derivative, or other parameters are trainable than at the start.
        """
        subject, parameters = self._subject, self._subject.parameters
        if {name: p.shape for name, p in parameters.items()} != self._shapes:
            raise ValueError(
                f"{len(parameters)} tensors of the model are trainable, {len(self._shapes)} were at the start of the "
                "monitor; start another one after freezing or adding parameters"
            )
        update = self._along.taken()
        distance, distance_se = self._start.distance(parameters)
        values: dict[str, Any] = {"distance": distance, "distance_se": distance_se, "learning_rate": rate}
        if math.isnan(rate) and self._optimizer is not None:  # no update of an optimiser of PyTorch so far
            values["learning_rate"] = followed_model.rate_of(self._optimizer, {id(p) for p in self._held.values()})
        simple = kind == "row" or self._shards.divided
        product = None if simple else Curvature(subject, parameters, "double-backward", gradient=True).product(0)
        if product is None:
            loss, gradient = self._loss_and_gradient()
        else:
            loss, gradient = product.value, unflat(product.gradient(), list(parameters.values()))
        values |= {"loss": loss, "gradient_norm": self._shards.norm(gradient)}
        values |= self._along.values(update, rate, loss, gradient)
        if product is None:
            return values
        check, parts = kind == "check", parts_of(subject, self._parts)
        noisy = noise(gram(gradients_of(subject, parts, flat(gradient))), 0 if len(parts) < 2 else parts[0].stop)
        like, size = next(iter(parameters.values())), sum(p.numel() for p in parameters.values())
        found = self._tracked.search(product, like, size, check=check)
        preconditioned = self._preconditioned(product, parameters, found, check=check)
        bend = math.nan
        if update:
            flattened = flat(update.values())
            bend = dot(flattened, product(flattened)).item() / step_norm(self._optimizer, self._held, update) ** 2
        return values | {
            "norm_sharpness": bend, "eigenvalue": found.values, "residual": found.residuals, "error": found.errors,
            "converged": found.converged, **preconditioned, "warm_error": found.warm_error,
            "products": found.products + preconditioned.pop("products"), "noise_scale": noisy.scale,
            "noise_scale_se": noisy.scale_se, "gradient_variance": noisy.variance, "gradient_squared": noisy.squared,
        }  # fmt: skip

    def _loss_and_gradient(self) -> tuple[float, Sequence[Tensor]]:
        """Loss of the mini-batch and its gradient by tensors; of weights divided by FSDP2 this process's parts."""
        subject = self._subject
        inputs, targets = subject.batch(0)
        with restoration.evaluation_mode(subject.model):
            loss = subject.losses(subject.outputs(inputs), targets).double().mean()
        if not self._shards.divided:
            return loss.item(), loss_gradients(loss, list(subject.parameters.values()))
        loss.backward()  # type: ignore[no-untyped-call]
        parts = own_parts({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._held.items()})
        return self._shards.mean(loss.item()), list(parts.values())

    @property
    def _held(self) -> dict[str, Tensor]:
        """The parameters that the optimiser holds, by the names of the subject's, which may be those of a copy."""
        model = self._subject.origin.original or self._subject.model
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _preconditioned(
        self, product: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], plain: Found, *, check: bool
    ) -> dict[str, Any]:
        """The eigenvalues that the optimiser sees, and both thresholds; NaN without an optimiser.

        An adaptive optimiser has no preconditioner before its first update, and one with learning rate 0, or whose
        threshold is not known, has none: NaN. That of SGD belongs to H plus the weight decay; `threshold`, that of H
        alone, is less by the decay, by the largest one where parameters have different ones.
        """
        nothing = np.full(self._top, np.nan)
        values: dict[str, Any] = {
            "preconditioned": nothing, "preconditioned_residual": nothing, "preconditioned_error": nothing,
            "preconditioned_converged": nothing,
            "threshold": math.nan, "preconditioned_threshold": math.nan, "products": 0,
        }  # fmt: skip
        if self._optimizer is None:
            return values
        try:
            known = preconditioner(self._optimizer, self._held)
        except ValueError as error:
            if not isinstance(error, NoUpdateYet | UnknownThreshold) and not self._warned:
                _log.warning("warning: no preconditioned eigenvalues: %s", error)
                self._warned = True
            return values
        values["preconditioned_threshold"] = known.threshold
        decays = {known.decay.get(name, 0.0) for name in parameters}
        if known.scale.keys() == parameters.keys() and all(map(_is_one, known.scale.values())):
            values["threshold"] = known.threshold - max(decays)
        if math.isfinite(values["threshold"]) and len(decays) == 1:
            (decay,) = decays
            found = replace(plain, values=plain.values + decay, products=0)
        else:
            own = next(iter(parameters.values()))
            found = self._tracked_preconditioned.search(
                known.of(product, parameters), own, sum(p.numel() for p in parameters.values()), check=check
            )
        return values | {
            "preconditioned": found.values, "preconditioned_residual": found.residuals,
            "preconditioned_error": found.errors, "preconditioned_converged": found.converged,
            "products": found.products,
        }  # fmt: skip


def _is_one(scale: Tensor) -> bool:
    return bool((scale - 1).abs().max() < 1e-6)

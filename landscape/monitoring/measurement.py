"""What is measured at one step of a run, on its mini-batch and at the present weights."""

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
PRODUCTS = 100  # at most, of one search
STORED = ("eigenvalue", "residual", "error", "converged")  # of every rank


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
    size: int  # of the matrix
    like: Tensor  # on its device and of its dtype
    seed: int
    _vectors: Tensor | None = field(default=None, init=False)
    _next: Tensor | None = field(default=None, init=False)  # that of the rank after them, (n,)
    _searches: int = field(default=0, init=False)

    def search(self, product: Callable[[Tensor], Tensor], *, check: bool) -> dict[str, Any]:
        """The largest eigenvalues of v -> H v, in descending order, and what else is `STORED` of each, (k,).

        With the `products` made and, of a check, `warm_error`. One that is not finite is NaN, and not converged.
        """
        self._searches += 1
        drawn = random_unit(self.size, self.seed + self._searches, device=self.like.device, dtype=self.like.dtype)
        missed, made = np.nan, []
        try:
            if self._vectors is None or check:
                made.append(self._lanczos(product, drawn, unseen=1.0))
            if self._vectors is not None:
                mixed = self._vectors.sum(dim=0) + RANDOM * drawn
                mixed = mixed if self._next is None else mixed.add_(self._next, alpha=NEXT)
                made.append(self._lanczos(product, mixed, unseen=UNSURE * RANDOM / length(mixed).item()))
        except FloatingPointError:
            self._vectors = None
            return {**dict.fromkeys(STORED, np.full(self.k, np.nan)), "converged": np.zeros(self.k), "products": 0}
        if len(made) > 1:
            cold, warm = (float(one.values[0]) for one in made)
            missed = (cold - warm) / abs(cold) if cold else np.nan
        found = max(made, key=lambda one: float(one.values[0]))
        assert found.vectors is not None
        self._vectors = found.vectors.clone()
        self._next = None if found.further is None else found.further[0].clone()
        parts = zip(STORED, (found.values, found.residuals, found.errors, found.converged), strict=True)
        lacking = (0, self.k - len(found.values))
        padded = {name: np.pad(np.asarray(part, float), lacking, constant_values=np.nan) for name, part in parts}
        return padded | {"warm_error": missed, "products": sum(one.products for one in made)}

    def _lanczos(self, product: Callable[[Tensor], Tensor], start: Tensor, *, unseen: float) -> Spectrum:
        room, storage = memory(start)
        k = min(self.k, self.size)
        return lanczos(
            product, start, k, which="LA", tol=self.tol, max_steps=max(PRODUCTS, k + 1), room=room,
            storage=storage, vectors=True, further=1, unseen=unseen,
        )  # fmt: skip


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
        self._subject, self._start, self._optimizer, self._parts = subject, start, optimizer, parts
        self._shapes = {name: p.shape for name, p in subject.parameters.items()}
        like = next(iter(subject.parameters.values()))
        self._plain, self._preconditioned = (
            TrackedEigenvalues(top, tol, subject.size, like, derived_seed(seed, of))
            for of in ("eigenvalues", "preconditioned")
        )
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
        product = None
        if kind == "row" or self._shards.divided:
            loss, gradient = self._loss_and_gradient()
        else:
            product = Curvature(subject, parameters, "double-backward", gradient=True).product(0)
            loss, gradient = product.value, unflat(product.gradient(), list(parameters.values()))
        values |= {"loss": loss, "gradient_norm": self._shards.norm(gradient)}
        values |= self._along.values(update, rate, loss, gradient)
        if product is None:
            return values
        check, parts = kind == "check", parts_of(subject, self._parts)
        if len(parts) > 1:
            values |= noise(gram(gradients_of(subject, parts, flat(gradient))), parts[0].stop)
        found = self._plain.search(product, check=check)
        seen = self._seen(product, found, check=check)
        if update:
            flattened = flat(update.values())
            bend = dot(flattened, product(flattened)).item()
            values["norm_sharpness"] = bend / step_norm(self._optimizer, self._held, update) ** 2
        return values | found | seen | {"products": found["products"] + seen.get("products", 0)}

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

    def _seen(self, product: Callable[[Tensor], Tensor], plain: Mapping[str, Any], *, check: bool) -> dict[str, Any]:
        """The eigenvalues that the optimiser sees, and both thresholds; none without an optimiser.

        An adaptive optimiser has no preconditioner before its first update, and one with learning rate 0, or whose
        threshold is not known, has none. That of SGD belongs to H plus the weight decay; `threshold`, that of H alone,
        is less by the decay, by the largest one where parameters have different ones.
        """
        if self._optimizer is None:
            return {}
        try:
            known = preconditioner(self._optimizer, self._held)
        except ValueError as error:
            if not isinstance(error, NoUpdateYet | UnknownThreshold) and not self._warned:
                _log.warning("warning: no preconditioned eigenvalues: %s", error)
                self._warned = True
            return {}
        parameters = self._subject.parameters
        values: dict[str, Any] = {"preconditioned_threshold": known.threshold}
        decays = {known.decay.get(name, 0.0) for name in parameters}
        if known.scale.keys() == parameters.keys() and all((s - 1).abs().max() < 1e-6 for s in known.scale.values()):
            values["threshold"] = known.threshold - max(decays)
        if "threshold" in values and len(decays) == 1:
            found = {**plain, "eigenvalue": plain["eigenvalue"] + max(decays), "products": 0}
        else:
            found = self._preconditioned.search(known.of(product, parameters), check=check)
        errors = {f"preconditioned_{name}": found[name] for name in STORED[1:]}
        return {**values, **errors, "preconditioned": found["eigenvalue"], "products": found["products"]}

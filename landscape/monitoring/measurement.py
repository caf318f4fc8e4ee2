"""What is measured at one step of a run, on its mini-batch and at the present weights."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.fx.experimental.symbolic_shapes  # noqa: F401  the first double backward imports it: longer than a row
from torch import Tensor
from torch.optim import Optimizer

from landscape.curvature.preconditioner import NoUpdateYet, preconditioner
from landscape.monitoring.distance import Start
from landscape.monitoring.gradients import gradients_of, gram, noise, parts_of
from landscape.monitoring.tracked_eigenvalues import Found, TrackedEigenvalues
from landscape.probe import derived_seed
from landscape.products.operator import Curvature
from landscape.products.vectors import length
from landscape.subject.subject import Subject

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
        self._warned = False
        if optimizer is not None:
            with contextlib.suppress(NoUpdateYet):
                preconditioner(optimizer, self._held)

    def at_present(self, *, check: bool) -> dict[str, Any]:
        """All numbers of the present weights; `check`: the eigenvalues from a random start too.

        Raises:
            ValueError: the model has no second derivative, or other parameters are trainable than at the start.
        """
        subject, parameters = self._subject, self._subject.parameters
        if {name: p.shape for name, p in parameters.items()} != self._shapes:
            raise ValueError(
                f"{len(parameters)} tensors of the model are trainable, {len(self._shapes)} were at the start of the "
                "monitor; start another one after freezing or adding parameters"
            )
        product = Curvature(subject, parameters, "double-backward").product(0)
        gradient, parts = product.gradient(), parts_of(subject, self._parts)
        noisy = noise(gram(gradients_of(subject, parts, gradient)), 0 if len(parts) < 2 else parts[0].stop)
        like, size = next(iter(parameters.values())), sum(p.numel() for p in parameters.values())
        found = self._tracked.search(product, like, size, check=check)
        preconditioned = self._preconditioned(product, parameters, found, check=check)
        distance, distance_se = self._start.distance(parameters)
        return {
            "loss": product.value,
            "gradient_norm": length(gradient).item(),
            "eigenvalue": found.values,
            "residual": found.residuals,
            "error": found.errors,
            "converged": found.converged,
            **preconditioned,
            "warm_error": found.warm_error,
            "products": found.products + preconditioned.pop("products"),
            "noise_scale": noisy.scale,
            "noise_scale_se": noisy.scale_se,
            "gradient_variance": noisy.variance,
            "gradient_squared": noisy.squared,
            "distance": distance,
            "distance_se": distance_se,
        }

    @property
    def _held(self) -> dict[str, Tensor]:
        """The parameters that the optimiser holds, by the names of the subject's, which may be those of a copy."""
        model = self._subject.origin.original or self._subject.model
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _preconditioned(
        self, product: Callable[[Tensor], Tensor], parameters: Mapping[str, Tensor], plain: Found, *, check: bool
    ) -> dict[str, Any]:
        """The eigenvalues that the optimiser sees, both thresholds, and its learning rate; NaN without an optimiser.

        Adam, RMSprop and Adagrad have no preconditioner before their first update, and no optimiser with learning rate
        0 has a threshold: NaN. That of SGD belongs to H plus the weight decay; `threshold`, that of H alone, is less by
        the decay, by the largest one where parameters have different ones.
        """
        nothing = np.full(self._top, np.nan)
        values: dict[str, Any] = {
            "preconditioned": nothing, "preconditioned_residual": nothing, "preconditioned_error": nothing,
            "preconditioned_converged": nothing,
            "threshold": math.nan, "preconditioned_threshold": math.nan, "learning_rate": math.nan, "products": 0,
        }  # fmt: skip
        if self._optimizer is None:
            return values
        values["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
        try:
            known = preconditioner(self._optimizer, self._held)
        except ValueError as error:
            if not isinstance(error, NoUpdateYet) and not self._warned:
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

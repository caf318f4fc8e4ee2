"""What is measured at one step of a run, on its mini-batch and at the present weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from landscape.curvature.operator import Curvature
from landscape.curvature.vectors import length
from landscape.monitoring.distance import Start
from landscape.monitoring.gradients import gram, loss_and_gradients, noise, parts_of
from landscape.monitoring.tracked_eigenvalues import TrackedEigenvalues
from landscape.probe import derived_seed
from landscape.subject.subject import Subject

PRODUCTS = 100  # at most, of one search


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
        parts = parts_of(subject, self._parts)
        loss, gradients = loss_and_gradients(subject, parts)
        inner, gradient_norm = gram(gradients), length(torch.stack(gradients).mean(dim=0)).item()
        size = 0 if len(parts) < 2 else parts[0].stop - parts[0].start
        noisy = noise(inner, size)
        del gradients
        curved = Curvature(subject, parameters, "kept")
        like = next(iter(parameters.values()))
        found = self._tracked.search(curved.product(0), like, curved.size, check=check)
        distance, distance_se = self._start.distance(parameters)
        unknown = np.full(self._top, np.nan)
        return {
            "loss": loss,
            "gradient_norm": gradient_norm,
            "eigenvalue": found.values,
            "residual": found.residuals,
            "converged": found.converged,
            "threshold": math.nan,
            "preconditioned": unknown,
            "preconditioned_residual": unknown,
            "preconditioned_converged": unknown,
            "preconditioned_threshold": math.nan,
            "learning_rate": math.nan if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"]),
            "warm_error": found.warm_error,
            "products": found.products,
            "noise_scale": noisy.scale,
            "noise_scale_se": noisy.scale_se,
            "gradient_variance": noisy.variance,
            "gradient_squared": noisy.squared,
            "distance": distance,
            "distance_se": distance_se,
        }

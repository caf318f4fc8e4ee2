"""Measure the Hessian's spectral density by stochastic Lanczos quadrature (Ubaru et al. 2017; Ghorbani et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from landscape.curvature.batched_lanczos import device_lanczos
from landscape.curvature.hvp_backends import (
    CODES,
    CODES_MEANING,
    HVP_HELP,
    Hvp,
    PlannedProducts,
    autotuned,
    curvature,
    without_hvp,
)
from landscape.curvature.operator import over_all_samples
from landscape.curvature.parameter_selection import PARAMS_HELP, matching
from landscape.curvature.vectors import random_unit
from landscape.options import at_least, one_of, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.results.statistics import mean_and_standard_error
from landscape.subject.subject import Subject


@dataclass(frozen=True)
class Density(Probe):
    """Density of all Hessian eigenvalues of loss + weight decay over all samples.

    A Lanczos run from a random unit vector v gives nodes and weights with sum_j weight_j f(node_j) = v' f(H) v, exact
    for polynomials up to degree 2 steps - 1; its mean over v is the mean of f over the eigenvalues. Nodes are stored
    unbroadened: the broadening is the figure's choice. Cost: steps products with all samples per vector.
    """

    name: ClassVar[str] = "density"
    uses: ClassVar[tuple[str, ...]] = ("weight_decay",)
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"vectors": 2, "steps": 3}
    presets: ClassVar[Mapping[str, Any]] = {"park2022": {"split": "train", "augment": True, "weight_decay": 0.05}}

    vectors: Annotated[int, "random start vectors"] = 8
    steps: Annotated[int, "Lanczos steps, and so nodes, per vector; at most the number of parameters"] = 40
    hvp: Annotated[Hvp, HVP_HELP] = "auto"
    params: Annotated[str, PARAMS_HELP] = ""
    seed: Annotated[int, "seed of the start vectors"] = 0

    def __post_init__(self) -> None:
        at_least("vectors", self.vectors, 1)
        at_least("steps", self.steps, 2)
        one_of("hvp", self.hvp, get_args(Hvp))
        regular_expression("params", self.params)

    def plan(self, subject: Subject) -> Plan:
        matching(subject.parameters, self.params)  # fails before any work where nothing matches
        eigenvalue, node = "loss per squared weight", ("node",)
        return Plan(
            over={"vector": np.arange(self.vectors)},
            axes={"node": np.arange(self.steps)},
            quantities={
                "nodes": Quantity("node of the quadrature: a Ritz value, ascending", eigenvalue, node),
                "weights": Quantity("its weight; those of a vector sum to 1", dims=node),
                "matvecs": Quantity("Hessian products with all samples spent"),
                "hvp": Quantity(CODES_MEANING),
            },
            summaries={
                "mean": Quantity("mean eigenvalue: the trace over the number of parameters", eigenvalue),
                "mean_se": Quantity("its standard error over start vectors", eigenvalue),
                "largest": Quantity("largest node", eigenvalue),
                "smallest": Quantity("smallest node", eigenvalue),
            },
            about={"vector": Quantity("start vector"), "node": Quantity("node")},
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        return without_hvp(self)

    def autotune(self, subject: Subject) -> dict[str, str]:
        return autotuned(subject, self.params, self.hvp, planned=self._planned(subject, self.vectors))

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> tuple[Density, Subject]:
        return replace(self, **choices), subject

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """One start vector after the other, with products prepared once."""
        parameters = matching(subject.parameters, self.params)
        curved = curvature(subject, parameters, self.hvp, planned=self._planned(subject, len(units)))
        product = over_all_samples(subject, curved)
        for unit in units:
            start = random_unit(curved.size, unit.seed(self.seed), device=subject.device, dtype=subject.dtype)
            yield {**self._quadrature(product, start), "hvp": CODES.index(curved.hvp)}

    def _planned(self, subject: Subject, vectors: int) -> PlannedProducts:
        return PlannedProducts(len(subject.batches), vectors * self.steps, rebuilt=True)

    def _quadrature(self, product: Callable[[Tensor], Tensor], start: Tensor) -> dict[str, Any]:
        nodes, weights = np.full((2, self.steps), np.nan)
        try:
            # tol 0: all nodes are wanted, and nothing stops the run before its last step.
            found = device_lanczos(product, start, self.steps, tol=0.0, max_steps=self.steps)
        except FloatingPointError:
            return {"nodes": nodes, "weights": weights, "matvecs": math.nan}
        # On breakdown the search continued with a random vector: the nodes from there on have no weight.
        known = found.weights > np.finfo(np.float64).tiny
        count = int(known.sum())
        nodes[:count] = found.nodes[known]
        weights[:count] = found.weights[known] / found.weights[known].sum()
        return {"nodes": nodes, "weights": weights, "matvecs": found.products}

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The first moment and both ends, over all finished start vectors."""
        known = (data["done"] == 1) & np.isfinite(data["nodes"][:, 0])
        nodes, weights = data["nodes"][known], data["weights"][known]
        if not len(nodes):
            return {}
        mean, error = mean_and_standard_error(np.nansum(nodes * weights, axis=1))
        return {"mean": mean, "mean_se": error, "largest": float(np.nanmax(nodes)), "smallest": float(np.nanmin(nodes))}

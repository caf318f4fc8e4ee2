"""Measure the Hessian's trace, per mini-batch and over all samples (Epperly, Tropp & Webber 2024; Hutchinson 1989)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np

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
from landscape.curvature.operator import Curvature
from landscape.curvature.parameter_selection import PARAMS_HELP, matching
from landscape.curvature.trace_estimators import TraceEstimate, hutch_plus_plus, hutchinson, xtrace
from landscape.options import at_least, one_of, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.subject import Subject

Method = Literal["xtrace", "hutchinson", "hutch++"]
METHODS: Mapping[str, Callable[..., TraceEstimate]]
METHODS = {"xtrace": xtrace, "hutchinson": hutchinson, "hutch++": hutch_plus_plus}


@dataclass(frozen=True)
class Trace(Probe):
    """Trace of the Hessian of loss + weight decay for the selected parameters, not divided by their number.

    Every mini-batch has its own random vectors. The trace over all samples is exactly the sample-weighted mean of those
    of the mini-batches: the loss is a mean over samples and the trace is linear. Its error thus also falls with the
    number of mini-batches, at no cost in memory.
    """

    name: ClassVar[str] = "trace"
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"vectors": 8}
    presets: ClassVar[Mapping[str, Any]] = {"park2022": {"split": "train", "augment": True, "weight_decay": 0.05}}

    method: Annotated[Method, "estimator; xtrace has the smallest error for the same work"] = "xtrace"
    vectors: Annotated[int, "Hessian products per mini-batch"] = 32
    hvp: Annotated[Hvp, HVP_HELP] = "auto"
    params: Annotated[str, PARAMS_HELP] = ""
    seed: Annotated[int, "seed of the random vectors"] = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, get_args(Method))
        at_least("vectors", self.vectors, 4)
        one_of("hvp", self.hvp, [hvp for hvp in get_args(Hvp) if hvp != "together"])
        regular_expression("params", self.params)

    def plan(self, subject: Subject) -> Plan:
        matching(subject.parameters, self.params)  # fails before any work where nothing matches
        trace = "loss per squared weight"
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            quantities={
                "batch_trace": Quantity("trace of the Hessian of the mini-batch", trace),
                "batch_trace_se": Quantity("its standard error over random vectors", trace),
                "samples": Quantity("samples in the mini-batch"),
                "loss": Quantity("loss of the mini-batch", subject.meaning.units),
                "matvecs": Quantity("Hessian products spent"),
                "hvp": Quantity(CODES_MEANING),
            },
            summaries={
                "trace": Quantity("trace of the Hessian over the samples of all finished mini-batches", trace),
                "trace_se": Quantity("its standard error over random vectors", trace),
                "trace_spread": Quantity("standard deviation of the traces of whole mini-batches", trace),
            },
            about={"batch": Quantity("mini-batch")},
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        return without_hvp(self)

    def autotune(self, subject: Subject) -> dict[str, str]:
        return autotuned(subject, self.params, self.hvp, planned=self._planned(len(subject.batches)), batched=False)

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> tuple[Trace, Subject]:
        return replace(self, **choices), subject

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches one after the other, with products prepared once for all of one shape."""
        parameters = matching(subject.parameters, self.params)
        curved = curvature(subject, parameters, self.hvp, planned=self._planned(len(units)), batched=False)
        for unit in units:
            yield self._estimate(curved, unit)

    def _planned(self, batches: int) -> PlannedProducts:
        return PlannedProducts(batches, self.vectors)

    def _estimate(self, curved: Curvature, unit: Unit) -> dict[str, float]:
        subject, (i,) = curved.subject, unit.index
        product = curved.product(i)
        values = {"samples": subject.samples(i), "loss": product.value, "hvp": CODES.index(curved.hvp)}
        try:
            estimate = METHODS[self.method](
                product, curved.size, self.vectors,
                seed=unit.seed(self.seed), device=subject.device, dtype=subject.dtype,
            )  # fmt: skip
        except FloatingPointError:
            return {**values, "batch_trace": math.nan, "batch_trace_se": math.nan, "matvecs": math.nan}
        return {**values, "batch_trace": estimate.value, "batch_trace_se": estimate.error, "matvecs": estimate.products}

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The sample-weighted mean over all finished mini-batches with a finite trace."""
        known = (data["done"] == 1) & np.isfinite(data["batch_trace"])
        if not known.any():
            return {}
        trace, error, samples = (data[name][known] for name in ("batch_trace", "batch_trace_se", "samples"))
        share = samples / samples.sum()
        whole = trace[samples == samples.max()]  # a smaller mini-batch spreads more
        return {
            "trace": float(share @ trace),
            "trace_se": float(np.sqrt(share**2 @ error**2)),
            "trace_spread": float(whole.std(ddof=1)) if len(whole) > 1 else math.nan,
        }

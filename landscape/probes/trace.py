"""Trace of the Hessian, per mini-batch and over all samples (Epperly, Tropp & Webber 2024; Hutchinson 1989)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np

from landscape.curvature.operator import CODES, HOW, Curvature, Hvp, curvature
from landscape.curvature.parameter_selection import matching
from landscape.curvature.trace_estimators import TraceEstimate, hutch_plus_plus, hutchinson, xtrace
from landscape.options import at_least, one_of, regular_expression
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.subject import Subject

Method = Literal["xtrace", "hutchinson", "hutch++"]
METHODS: Mapping[str, Callable[..., TraceEstimate]] = {
    "xtrace": xtrace,
    "hutchinson": hutchinson,
    "hutch++": hutch_plus_plus,
}


@dataclass(frozen=True)
class Trace(Probe):
    """Trace of the Hessian of loss + weight decay, for all parameters asked for; not divided by their number.

    Every mini-batch has random vectors of its own. The trace over all samples is the sample-weighted mean of those of
    the mini-batches, exactly: the loss is a mean over samples and the trace is linear. Its error thus falls with the
    number of mini-batches too, at no cost in memory.
    """

    name: ClassVar[str] = "trace"
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"vectors": 8}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {"split": "train", "augment": True, "weight_decay": 0.05}
    }

    method: Annotated[Method, "estimator; xtrace has the smallest error for the same work"] = "xtrace"
    vectors: Annotated[int, "Hessian products per mini-batch"] = 32
    hvp: Annotated[Hvp, "how products are made; auto tries and takes the fastest, equal to rounding"] = "auto"
    params: Annotated[str, "regular expression: only parameters whose name it finds"] = ""
    seed: Annotated[int, "seed of the random vectors"] = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, get_args(Method))
        at_least("vectors", self.vectors, 4)
        one_of("hvp", self.hvp, [hvp for hvp in get_args(Hvp) if hvp != "together"])
        regular_expression("params", self.params)

    def plan(self, subject: Subject) -> Plan:
        matching(subject.parameters, self.params)  # nothing is begun for an expression that finds none
        trace = "loss per squared weight"
        return Plan(
            over={"batch": np.arange(len(subject.batches))},
            quantities={
                "batch_trace": Quantity("trace of the Hessian of the mini-batch", trace),
                "batch_trace_se": Quantity("its standard error over random vectors", trace),
                "samples": Quantity("samples in the mini-batch"),
                "loss": Quantity("loss of the mini-batch", subject.meaning.units),
                "matvecs": Quantity("Hessian products spent"),
                "hvp": Quantity(HOW),
            },
            summaries={
                "trace": Quantity("trace of the Hessian over the samples of all finished mini-batches", trace),
                "trace_se": Quantity("its standard error over random vectors", trace),
                "trace_spread": Quantity("standard deviation of the traces of whole mini-batches", trace),
            },
            about={"batch": Quantity("mini-batch")},
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters without the way products are made, which changes nothing but rounding."""
        return {name: value for name, value in asdict(self).items() if name != "hvp"}

    def autotune(self, subject: Subject) -> dict[str, str]:
        """How products are made, chosen once for the whole answer where that is left to a trial."""
        if self.hvp != "auto":
            return {}
        parameters, batches = matching(subject.parameters, self.params), len(subject.batches)
        return {"hvp": curvature(subject, parameters, "auto", batches=batches, joint=False).kind}

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> tuple[Trace, Subject]:
        """Probe and subject with the choices of a trial."""
        return replace(self, **choices), subject

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches one after the other, with products prepared once for all of one shape."""
        parameters = matching(subject.parameters, self.params)
        products = curvature(subject, parameters, self.hvp, batches=len(units), joint=False)
        for unit in units:
            yield self._estimate(subject, products, unit)

    def _estimate(self, subject: Subject, products: Curvature, unit: Unit) -> dict[str, float]:
        (i,) = unit.index
        product = products.product(i)
        values = {"samples": len(subject.batches[i][1]), "loss": product.value, "hvp": CODES.index(products.kind)}
        size = sum(p.numel() for p in products.parameters.values())
        try:
            found = METHODS[self.method](
                product, size, self.vectors,
                seed=unit.seed(self.seed), device=subject.device, dtype=subject.dtype,
            )  # fmt: skip
        except FloatingPointError:
            return {**values, "batch_trace": math.nan, "batch_trace_se": math.nan, "matvecs": math.nan}
        return {**values, "batch_trace": found.value, "batch_trace_se": found.error, "matvecs": found.products}

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

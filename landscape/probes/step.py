"""Measure the step that an optimiser would make: sharpness along it, and predicted against actual change of the loss.

Sharpness along the gradient, averaged over mini-batches, is the batch sharpness of Andreyev & Beneventano (arXiv
2412.20553, Definition 3); the critical learning rate along the update is that of Kalra et al. (arXiv 2601.16979).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape.curvature import preconditioner
from landscape.curvature.spectrum import Request
from landscape.headline import FLATTER, Headline
from landscape.options import at_least, one_of
from landscape.probe import Plan, Probe, Quantity, Unit, Values, report_products
from landscape.products.hvp_backends import KINKS_HELP, Kinks, curvature
from landscape.products.mini_batch_means import whole_batches
from landscape.statistics.means import finite_means, jackknife_error
from landscape.subject import optimizers
from landscape.subject.subject import Subject, more_samples
from landscape.weight_space.optimizer_step import StepMeasurement

BATCH_SHARPNESS = "mean over mini-batches of g'Hg / |g|^2, the expectation of the ratio (arXiv 2412.20553, Def. 3)"
POOLED = "sum over mini-batches of g'Hg over that of |g|^2, the ratio of the expectations"
CRITICAL = "2 / eta_c, eta_c the smallest learning rate along the update at which the loss exceeds its start"
PRECONDITIONED = Quantity(
    "preconditioned sharpness, mean over mini-batches", preconditioner.UNITS, ("rank",), error="mini-batches"
)
TOL, MAX_PRODUCTS = 1e-3, 200  # relative error of a preconditioned eigenvalue, and the most products it may take
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step(Probe):
    """The next update of the optimiser, for the gradient of each mini-batch, from copies of weights and state.

    The optimiser gets the gradient of the loss, as in training, and adds its own weight decay; what is measured is the
    objective, loss + `weight_decay` (1/2) ||w||^2. With update u, gradient g and Hessian H of the objective on the
    mini-batch: norms and angle; sharpness u'Hu / |u|^2 along the update and g'Hg / |g|^2 along the gradient; the change
    of the objective that the update makes, predicted to first (g'u) and second order (g'u + u'Hu / 2) and actual, on
    the same mini-batch and, with their own g and H, on the `others` that follow it.

    Critical sharpness is 2 / (c eta): c u is where the objective first exceeds its start, eta the learning rate (the
    largest one of several groups). It is found within 2^-4 in at most 10 forward passes, and of a quadratic with plain
    gradient descent it is g'Hg / |g|^2. An update against which the objective rises at once has none: see `descends`.
    A mini-batch costs 2 Hessian products, and each of the others one, all by double backward.

    The `top` largest eigenvalues of P^-1/2 H P^-1/2, the Hessian of the loss as the optimiser sees it, and the
    threshold above which it is unstable are those of `hessian --operator preconditioned`, to 0.1 %: about 10 products
    more. Both are left out for an optimiser whose threshold is not known, and before an adaptive one's first update.
    """

    name: ClassVar[str] = "step"
    differentiates: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)}
    errors_over: ClassVar[str] = "mini-batches"
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("batch sharpness", "mean_batch_sharpness", reading=FLATTER),
        Headline("critical sharpness", "mean_critical_sharpness", reading=FLATTER),
        Headline("sharpness along the update", "mean_directional_sharpness", reading=FLATTER),
        Headline("change of the objective", "mean_actual_change"),
        Headline("preconditioned sharpness / threshold", "preconditioned", {"rank": 0}, by="threshold"),
    )

    optimizer: Annotated[str, optimizers.OPTIMIZER_HELP] = ""
    optimizer_arg: Annotated[tuple[str, ...], optimizers.OPTIMIZER_ARG_HELP] = ()
    optimizer_state: Annotated[bool, optimizers.OPTIMIZER_STATE_HELP] = True
    clip: Annotated[float, "clip the gradient to this norm before the update, as in training; 0: no clipping"] = 0.0
    batches: Annotated[int, "number of mini-batches; default 0: all"] = 0
    top: Annotated[int, "number of largest preconditioned eigenvalues per mini-batch; 0 leaves them out"] = 1
    others: Annotated[int, "further mini-batches on which each update is tried"] = 1
    kinks: Annotated[Kinks, KINKS_HELP] = "double"

    def __post_init__(self) -> None:
        at_least("clip", self.clip, 0.0)
        at_least("batches", self.batches, 0)
        at_least("others", self.others, 0)
        at_least("top", self.top, 0)
        one_of("kinks", self.kinks, get_args(Kinks))
        _ = self._options

    def plan(self, subject: Subject) -> Plan:
        restored = optimizers.restored_optimizer(subject, self._options)
        if restored.left_out:
            _log.info("%d parameters got no gradient in training and are not moved", len(restored.left_out))
        clipped = subject.checkpoint.recipe.get("clip", 0.0) if subject.checkpoint is not None else 0.0
        if clipped and not self.clip and not restored.fresh:
            _log.info("the training clipped gradients to norm %g; --clip %g makes its update", clipped, clipped)
        batches = np.arange(self._count(subject))
        known = _preconditioner(restored)
        seen, sharpness = known is not None and self.top > 0, "loss per squared weight"
        quantities = _quantities(subject.meaning.units) | (preconditioner.SEEN if seen else {})
        means = {
            f"mean_{name}": replace(known, long_name=f"mean over mini-batches: {known.long_name}", error="mini-batches")
            for name, known in quantities.items()
            if name in MEANS
        }
        return Plan(
            over={"batch": batches},
            axes={"rank": np.arange(self.top)} if seen else {},
            quantities=quantities,
            summaries={
                **means,
                "mean_batch_sharpness": Quantity(BATCH_SHARPNESS, sharpness, error="mini-batches"),
                "pooled_batch_sharpness": Quantity(POOLED, sharpness, error="mini-batches (jackknife)"),
                "descending": Quantity("share of the mini-batches along whose update the objective falls at first"),
                **({"preconditioned": PRECONDITIONED} if seen else {}),
            },
            labels={}
            if known is None
            else {"threshold": (preconditioner.STABILITY["threshold"], np.array(known.threshold))},
            about={"rank": Quantity("rank, from the largest")} if seen else {},
            facts={
                "optimizer": restored.words,
                "learning_rate": restored.learning_rate,
                "parameters_moved": sum(p.numel() for p in restored.parameters.values()),
                **({} if known is None else {"stability": known.definition}),
            },
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The optimiser that the options name and the digest of its state."""
        return {**optimizers.optimizer_identity(subject, self._options), "batches": self._count(subject)}

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """One mini-batch after the other: each moves the weights, which are restored bit for bit."""
        restored = optimizers.restored_optimizer(subject, self._options)
        curved = replace(curvature(subject, restored.parameters, "double-backward", kinks=self.kinks), gradient=True)
        known = _preconditioner(restored)
        request = Request(self.top, "LA", TOL, None, 1.0, MAX_PRODUCTS, vectors=False, verify=True)
        seen = preconditioner.SeenByOptimizer(known, request) if known is not None and self.top else None
        report_products(per_unit=2 + self._others(subject) + (8 + 2 * self.top if seen else 0))
        measurement = StepMeasurement(subject, restored, curved, self.clip, seen)
        nothing: dict[str, Any] = dict.fromkeys(_quantities(""), np.nan)
        nothing |= dict.fromkeys(preconditioner.SEEN, np.full(self.top, np.nan)) if seen else {}
        for unit in units:
            values = nothing | measurement.of(unit.index[0], self._beside(subject, unit))
            yield values | {"batch_sharpness": values["gradient_sharpness"]}

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Means over the finished mini-batches with finite values, and their standard errors."""
        done = data["done"] == 1
        sources = {f"mean_{name}": name for name in (*MEANS, "batch_sharpness")}
        sources |= {"preconditioned": "batch_preconditioned"} if "batch_preconditioned" in data else {}
        found: dict[str, Any] = {}
        for name, source in sources.items():
            found[name], found[f"{name}_se"], found[f"{name}_se.n"] = finite_means(data[source][done])
        found["descending"], *_ = finite_means(data["descends"][done])
        known = done & np.isfinite(data["gradient_sharpness"])
        squares = data["gradient_norm"][known] ** 2
        products = data["gradient_sharpness"][known] * squares
        if squares.sum():
            found["pooled_batch_sharpness"] = products.sum() / squares.sum()
        if len(squares) > 1 and squares.sum():
            left_out = (products.sum() - products) / (squares.sum() - squares)
            found["pooled_batch_sharpness_se"] = float(jackknife_error(left_out))
            found["pooled_batch_sharpness_se.n"] = len(squares)
        return found

    @property
    def _options(self) -> optimizers.OptimizerOptions:
        return optimizers.OptimizerOptions(self.optimizer, tuple(self.optimizer_arg), self.optimizer_state)

    def _count(self, subject: Subject) -> int:
        usable = whole_batches(subject)
        if self.batches > usable:
            raise ValueError(
                f"--batches {self.batches} needs as many whole mini-batches, and {subject.data.in_words} gives "
                f"{usable} of {subject.samples(0)} samples; "
                + more_samples(subject, "lower --batches", "lower --batch-size")
            )
        return self.batches or usable

    def _others(self, subject: Subject) -> int:
        return min(self.others, self._count(subject) - 1)

    def _beside(self, subject: Subject, unit: Unit) -> list[int]:
        count = self._count(subject)
        return [(unit.index[0] + k) % count for k in range(1, 1 + self._others(subject))]


MEANS = (
    "update_norm", "gradient_norm", "angle", "directional_sharpness", "critical_sharpness", "predicted_change_first",
    "predicted_change", "actual_change", "other_predicted_change_first", "other_predicted_change",
    "other_actual_change",
)  # fmt: skip


def _quantities(loss: str) -> dict[str, Quantity]:
    sharpness, first, second = "loss per squared weight", "g'u", "g'u + u'Hu / 2"
    beside = "mean over the other mini-batches: "
    return {
        "loss": Quantity("objective on the mini-batch", loss),
        "samples": Quantity("samples in the mini-batch"),
        "update_norm": Quantity("norm of the update u", "weight"),
        "gradient_norm": Quantity("norm of the gradient g", "loss per weight"),
        "angle": Quantity("angle between the update and -g", "degree"),
        "directional_sharpness": Quantity("u'Hu / |u|^2, along the update", sharpness),
        "gradient_sharpness": Quantity("g'Hg / |g|^2, along the gradient", sharpness),
        "batch_sharpness": Quantity("the same, as the term of the batch sharpness, which is its mean", sharpness),
        "critical_sharpness": Quantity(CRITICAL, sharpness, bounds="positive"),
        "critical_multiple": Quantity("eta_c as a multiple of the learning rate"),
        "critical_passes": Quantity("forward passes of the search for eta_c, that of the start included"),
        "converged": Quantity("1 if eta_c is known within 2^(1/16), 0 if not, also where there is none"),
        "descends": Quantity("1 if the objective falls at first along the update, 0 if it rises at once"),
        "predicted_change_first": Quantity(f"change of the objective to first order, {first}", loss),
        "predicted_change": Quantity(f"change of the objective to second order, {second}", loss),
        "actual_change": Quantity("change of the objective by the update", loss),
        "other_predicted_change_first": Quantity(f"{beside}change to first order", loss),
        "other_predicted_change": Quantity(f"{beside}change to second order", loss),
        "other_actual_change": Quantity(f"{beside}change by the update", loss),
    }


def _preconditioner(restored: optimizers.RestoredOptimizer) -> preconditioner.Preconditioner | None:
    """That of an optimiser, before its next update; None where its threshold is not known."""
    try:
        return preconditioner.preconditioner(restored.optimizer, restored.copies)
    except ValueError as error:
        _log.info("no preconditioned eigenvalues: %s", error)
        return None

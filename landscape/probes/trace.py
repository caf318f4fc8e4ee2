"""Measure the Hessian's trace, per mini-batch and over all samples (Epperly, Tropp & Webber 2024; Hutchinson 1989)."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from torch import Tensor

from landscape.curvature.block_diagonal import BLOCK_KINDS, BlockKind
from landscape.curvature.hessian_structure import ABOUT, Diagonal, Structure
from landscape.curvature.trace_estimators import (
    TraceEstimate,
    hutch_plus_plus,
    hutchinson,
    independent_values,
    rounds_for,
    xtrace,
)
from landscape.headline import FLATTER, Headline
from landscape.options import OptionError, at_least, one_of, regular_expression, require
from landscape.probe import Plan, Probe, Quantity, Stage, Unit, Values, derived_seed, report_products
from landscape.products import hvp_backends, micro_batches, operator
from landscape.products.hvp_reference import PlannedProducts
from landscape.products.kinks import PatternCache
from landscape.products.mini_batch_means import mean_loss, over_mini_batches
from landscape.products.parameter_selection import PARAMS_HELP, matching
from landscape.subject.subject import Subject

Method = Literal["xtrace", "hutchinson", "hutch++"]
METHODS: Mapping[str, Callable[..., TraceEstimate]]
METHODS = {"xtrace": xtrace, "hutchinson": hutchinson, "hutch++": hutch_plus_plus}
OF_A_ROUND = "round_"  # before the names of quantities that are measured in rounds
ESTIMATED = ("batch_trace", "batch_trace_se", "batch_square", "batch_square_se", "matvecs")
STORED = 4  # vectors in the memory of an estimate, for each of its random vectors
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trace(Probe):
    """Trace of the Hessian of loss + weight decay for the selected parameters, not divided by their number.

    Every mini-batch has its own random vectors. The trace over all samples is exactly the sample-weighted mean of those
    of the mini-batches: the loss is a mean over samples and the trace is linear. Its error thus also falls with the
    number of mini-batches, at no cost in memory.

    The same products give the squared Frobenius norm of each mini-batch's Hessian, E |H v|^2 = tr H^2, by the same
    estimator with H^2 for H. It is not linear: the norm of the Hessian over all samples is smaller than the root mean
    square over mini-batches, and follows from `density` (mean_square) or from one mini-batch of all samples.

    `blocks` and `diagonal` also measure how the Hessian is made: `curvature.hessian_structure` has the definitions. The
    ratios take a quarter of `vectors`, each with a product of the Hessian, of Gauss-Newton, and of every block (a
    quarter to a third of a product on average); the diagonal takes `vectors` products.

    `kinks` double fixes the activation pattern of every mini-batch to that of double precision, as for `hessian`.

    `tol` adds vectors until the standard error of the trace over all samples is at most this share of its magnitude.
    They come in rounds, each an independent estimate from `vectors` products, so that memory does not grow; the trace
    of a mini-batch is the mean of its rounds. After each stage the errors so far say how many more rounds are needed,
    of which mini-batches in turn, and at most as many as before are added. The unit is one round of a mini-batch.
    """

    name: ClassVar[str] = "trace"
    staged_by: ClassVar[str] = "--tol"
    differentiates: ClassVar[bool] = True
    by_process_group: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"vectors": 8}
    presets: ClassVar[Mapping[str, Any]] = {"park2022": {"split": "train", "augment": True, "weight_decay": 0.05}}
    errors_over: ClassVar[str] = "random vectors"
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("trace", "trace", reading=FLATTER, column=9, title="trace",
                 definition="sum of all Hessian eigenvalues"),
        Headline("frobenius", "frobenius", reading=FLATTER),
        Headline("off_block", "off_block"),
        Headline("non_gauss_newton", "non_gauss_newton"),
    )  # fmt: skip

    method: Annotated[Method, "estimator; xtrace has the smallest error for the same work"] = "xtrace"
    vectors: Annotated[int, "Hessian products per mini-batch"] = 32
    tol: Annotated[
        float, "add vectors until the standard error is this share of the trace, such as 0.01; 0: exactly --vectors"
    ] = 0.0
    max_vectors: Annotated[int, "with --tol: most Hessian products per mini-batch"] = 1024
    hvp: Annotated[hvp_backends.Hvp, hvp_backends.HVP_HELP] = "auto"
    kinks: Annotated[hvp_backends.Kinks, hvp_backends.KINKS_HELP] = "double"
    params: Annotated[str, PARAMS_HELP] = ""
    blocks: Annotated[
        BlockKind, f"also the share of H outside its diagonal blocks, and beyond Gauss-Newton; {BLOCK_KINDS}"
    ] = "none"
    diagonal: Annotated[
        Diagonal, "also the diagonal of the Hessian: summary per parameter tensor, or full for every entry"
    ] = "none"
    seed: Annotated[int, "seed of the random vectors"] = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, get_args(Method))
        at_least("vectors", self.vectors, 4)
        require(0 <= self.tol < 1, "tol", self.tol, "at least 0 and below 1")
        at_least("max_vectors", self.max_vectors, self.vectors if self.tol else 4)
        one_of("hvp", self.hvp, get_args(hvp_backends.Hvp))
        one_of("kinks", self.kinks, get_args(hvp_backends.Kinks))
        regular_expression("params", self.params)
        one_of("blocks", self.blocks, get_args(BlockKind))
        one_of("diagonal", self.diagonal, get_args(Diagonal))
        if self.tol and self._structure.products:
            raise OptionError("--tol adds vectors for the trace alone; leave it out with --blocks and --diagonal")

    def plan(self, subject: Subject) -> Plan:
        parameters = matching(subject.parameters, self.params)  # fails before any work where nothing matches
        structure = self._structure
        structure.require_storable(parameters, len(subject.batches))
        trace = "loss per squared weight"
        quantities = {
            "batch_trace": Quantity("trace of the Hessian of the mini-batch", trace, error="random vectors"),
            "batch_square": Quantity(
                "squared Frobenius norm of the Hessian of the mini-batch",
                f"({trace})^2",
                bounds="positive",
                error="random vectors",
            ),
            "samples": Quantity("samples in the mini-batch"),
            "loss": Quantity("loss of the mini-batch", subject.meaning.units),
            "matvecs": Quantity("Hessian products spent"),
            "hvp": Quantity(hvp_backends.CODES_MEANING),
        }
        summaries = {
            "trace": Quantity(
                "trace of the Hessian over the samples of all finished mini-batches", trace, error="random vectors"
            ),
            "trace_spread": Quantity("standard deviation of the traces of whole mini-batches", trace),
            "frobenius": Quantity(
                "Frobenius norm of the Hessian of a mini-batch, root mean square over them",
                trace,
                bounds="positive",
                error="random vectors",
            ),
        }
        over = {"batch": np.arange(len(subject.batches))}
        about = {}
        if self.tol:
            over["round"], about["round"] = np.arange(self._rounds), Quantity("round of random vectors")
            met = "1 if trace_se / |trace| is at most tol, 0 if the rounds of max_vectors ended before"
            summaries |= {name: replace(known, dims=("batch",)) for name, known in quantities.items()}
            summaries["within_tol"] = Quantity(met)
            quantities = {
                OF_A_ROUND + name: replace(known, long_name=f"{known.long_name}, in one round")
                for name, known in quantities.items()
            }
        return Plan(
            over=over, axes=structure.axes(parameters), quantities=quantities | structure.quantities(),
            labels=structure.labels(parameters), summaries=summaries | structure.summaries(),
            about=about | ABOUT,
        )  # fmt: skip

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The backend changes nothing but rounding; without a target there is no cap on the vectors."""
        return {"hvp": None, **({} if self.tol else {"max_vectors": None})}

    def autotune(self, subject: Subject) -> dict[str, str]:
        batches = len(subject.batches)
        with micro_batches.mini_batches_at_once(subject, batches, vectors=STORED * self.vectors) as at_once:
            planned = PlannedProducts(batches, self.vectors, at_once=at_once, stored=self._stored(subject))
            return hvp_backends.autotuned(subject, self.params, self.hvp, planned=planned, kinks=self.kinks)

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches side by side in threads, with products prepared once for all of one shape."""
        parameters = matching(subject.parameters, self.params)
        batches = [list(rounds) for _, rounds in groupby(units, lambda unit: unit.index[0])]
        with micro_batches.mini_batches_at_once(subject, len(batches), vectors=STORED * self.vectors) as at_once:
            planned = PlannedProducts(len(units), self.vectors, at_once=at_once, stored=self._stored(subject))
            curved = hvp_backends.curvature(subject, parameters, self.hvp, planned=planned, kinks=self.kinks)
            micro_batches.announce(subject, at_once)
            report_products(per_unit=self.vectors + self._structure.products)
            measured = partial(self._estimates, curved)
            yield from micro_batches.side_by_side(batches, measured, at_once, crowded=lambda: curved.exceeds_memory)

    def _stored(self, subject: Subject) -> int:
        """Bytes of the vectors that an estimate keeps."""
        parameters = matching(subject.parameters, self.params).values()
        return (1 if self.method == "hutchinson" else STORED * self.vectors) * sum(
            p.numel() * p.element_size() for p in parameters
        )

    def _estimates(self, curved: operator.Curvature, rounds: Sequence[Unit]) -> Iterator[Values]:
        """Those of one mini-batch."""
        if self._structure.products:  # its three matrices share the activation pattern
            curved = replace(curved, patterns=PatternCache())
        product, loss = self._product(curved, rounds[0].index[0])
        for unit in rounds:
            found: dict[str, Any] = self._estimate(curved, product, loss, unit)
            if self._structure.products:
                found |= self._structure.measure(curved, product, unit.index[0], self.seed)
            yield {OF_A_ROUND + name: value for name, value in found.items()} if self.tol else found

    def _product(self, curved: operator.Curvature, i: int) -> tuple[Callable[[Tensor], Tensor], float]:
        """The matrix of a mini-batch, whose samples the processes of a group share, and its loss."""
        if curved.subject.processes.size > 1:
            return over_mini_batches(curved, [i]), mean_loss(curved.subject, [i])
        product = curved.product(i)
        return product, product.value

    def _estimate(
        self, curved: operator.Curvature, product: Callable[[Tensor], Tensor], loss: float, unit: Unit
    ) -> dict[str, float]:
        subject, i = curved.subject, unit.index[0]
        keys = unit.index if self.tol and unit.index[1] else (i,)  # the first round is that of a run without tol
        values = {"samples": subject.samples(i), "loss": loss, "hvp": hvp_backends.CODES.index(curved.hvp)}
        try:
            estimate = METHODS[self.method](
                product, curved.size, self.vectors,
                seed=derived_seed(self.seed, *keys), device=subject.device, dtype=subject.dtype,
            )  # fmt: skip
        except FloatingPointError:
            return {**values, **dict.fromkeys(ESTIMATED, math.nan)}
        found = (estimate.value, estimate.error, estimate.square, estimate.square_error, estimate.products)
        return {**values, **dict(zip(ESTIMATED, found, strict=True))}

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage | None:
        """With `tol` the rounds that its target needs by the errors so far; else every mini-batch at once."""
        if not self.tol:
            return None
        done = data["done"] == 1
        counts = np.ones(len(done), dtype=int)  # rounds of each mini-batch that are decided
        while True:
            chosen = np.arange(done.shape[1]) < counts[:, None]
            if missing := [(int(i), int(k)) for i, k in np.argwhere(chosen & ~done)]:
                return Stage(missing, {})
            wanted = self._wanted({**data, "done": chosen}, counts)  # as a run that stopped here decided
            if (wanted == counts).all():
                break
            counts = wanted
        return Stage([], {name: np.full(done.shape, np.nan) for name in data if name.startswith(OF_A_ROUND)})

    def _wanted(self, data: Mapping[str, np.ndarray], counts: np.ndarray) -> np.ndarray:
        """Rounds of each mini-batch by the errors so far, (batch,): `counts` where the target, or the cap, is met."""
        known, found = _of_batches(data), self.reduce(data)
        finite, wanted = np.isfinite(known["batch_trace"]), counts.copy()
        if not found:
            return wanted
        share = known["samples"][finite] / known["samples"][finite].sum()
        variances = share**2 * known["batch_trace_se"][finite] ** 2 * counts[finite]
        error, target = found["trace_se"], self.tol * abs(found["trace"])
        wanted[finite] = rounds_for(variances, counts[finite], target, most=self._rounds)
        if error > target and (wanted == counts).all():
            times = (error / target) ** 2 if target else math.inf
            _log.warning(
                "trace: its standard error is %.2g of the trace, above --tol %g, at the cap of --max-vectors %d; "
                "about --max-vectors %.2g would meet it", error / max(abs(found["trace"]), 1e-300), self.tol,
                self.max_vectors, times * self.vectors * self._rounds,
            )  # fmt: skip
        return wanted

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The sample-weighted mean over all finished mini-batches with a finite trace."""
        of_batches = _of_batches(data) if self.tol else {}
        found = _over_batches({**data, **of_batches, **({"done": of_batches["samples"] > 0} if self.tol else {})})
        if self.tol and found:
            found["within_tol"] = float(found["trace_se"] <= self.tol * abs(found["trace"]))
        structure = self._structure.reduce(data) if found else {}
        return {**of_batches, **found, **structure, **(self._counts(data) if found else {})}

    def _counts(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """How many independent values are behind the errors: those of an estimate, of all finished with a trace."""
        name = OF_A_ROUND * bool(self.tol) + "batch_trace"
        known = (data["done"] == 1) & np.isfinite(data[name])
        one, rounds = independent_values(self.method, self.vectors), known.reshape(len(known), -1).sum(axis=1)
        of_batch = one * float(rounds[rounds > 0].min())
        return {
            **{f"{name}_se.n": of_batch for name in ("batch_trace", "batch_square")},
            **{f"{OF_A_ROUND}{name}_se.n": one for name in ("batch_trace", "batch_square") if self.tol},
            **{f"{name}_se.n": float(one * rounds.sum()) for name in ("trace", "frobenius")},
        }

    @property
    def _structure(self) -> Structure:
        return Structure(self.blocks, self.diagonal, self.vectors)

    @property
    def _rounds(self) -> int:
        """Most rounds of a mini-batch."""
        return self.max_vectors // self.vectors


def _of_batches(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Quantities of mini-batches, (batch,), from those of their finished rounds, (batch, round)."""
    rounds = {name.removeprefix(OF_A_ROUND): v for name, v in data.items() if name.startswith(OF_A_ROUND)}
    known = (data["done"] == 1) & np.isfinite(rounds["samples"])
    count = np.where(known.any(axis=1), known.sum(axis=1), np.nan)
    sums = {name: np.where(known, values, 0.0).sum(axis=1) for name, values in rounds.items()}
    means = {name: sums[name] / count for name in ("batch_trace", "batch_square", "samples", "loss")}
    first = np.take_along_axis(rounds["hvp"], known.argmax(axis=1)[:, None], axis=1)[:, 0]  # a mean of codes is another
    errors = {
        name: np.sqrt((np.where(known, rounds[name], 0.0) ** 2).sum(axis=1)) / count
        for name in ("batch_trace_se", "batch_square_se")
    }
    return {
        **means,
        **errors,
        "matvecs": np.where(np.isfinite(count), sums["matvecs"], np.nan),
        "hvp": np.where(np.isfinite(count), first, np.nan),
    }


def _over_batches(data: Mapping[str, np.ndarray]) -> dict[str, float]:
    known = (data["done"] == 1) & np.isfinite(data["batch_trace"])
    if not known.any():
        return {}
    trace, error, samples = (data[name][known] for name in ("batch_trace", "batch_trace_se", "samples"))
    share = samples / samples.sum()
    whole = trace[samples == samples.max()]  # a smaller mini-batch spreads more
    square, square_error = data["batch_square"][known], data["batch_square_se"][known]
    norm = float(np.sqrt(max(share @ square, 0.0)))
    return {
        "trace": float(share @ trace),
        "trace_se": float(np.sqrt(share**2 @ error**2)),
        "trace_spread": float(whole.std(ddof=1)) if len(whole) > 1 else math.nan,
        "frobenius": norm,
        "frobenius_se": float(np.sqrt(share**2 @ square_error**2)) / (2 * norm) if norm else 0.0,
    }

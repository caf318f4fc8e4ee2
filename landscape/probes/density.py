"""Measure the Hessian's spectral density by stochastic Lanczos quadrature (Ubaru et al. 2017; Ghorbani et al. 2019)."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from landscape.curvature import block_diagonal, trace_estimators
from landscape.curvature.lanczos import Spectrum, lanczos
from landscape.headline import FLATTER, Headline
from landscape.options import OptionError, at_least, one_of, regular_expression, require
from landscape.probe import Plan, Probe, Quantity, Stage, Unit, Values, report_products
from landscape.products import hvp_reference, mini_batch_means, operator
from landscape.products.hvp_backends import CODES, CODES_MEANING, HVP_HELP, KINKS_HELP, Hvp, Kinks, autotuned, curvature
from landscape.products.parameter_selection import PARAMS_HELP, matching
from landscape.products.vectors import random_unit
from landscape.statistics.means import mean_and_standard_error
from landscape.subject.subject import Subject

MEASURED = ("nodes", "weights", "matvecs", "hvp")  # per start vector
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Density(Probe):
    """Density of all Hessian eigenvalues of loss + weight decay over all samples.

    A Lanczos run from a random unit vector v gives nodes and weights with sum_j weight_j f(node_j) = v' f(H) v, exact
    for polynomials up to degree 2 steps - 1; its mean over v is the mean of f over the eigenvalues. Nodes are stored
    unbroadened: the broadening is the figure's choice. Cost: steps products with all samples per vector. The mean
    squared eigenvalue, the squared Frobenius norm over the number of parameters, is the mean of |H v|^2; like the mean
    it has no bias at any number of steps.

    `kinks` double fixes the activation pattern of every mini-batch to that of double precision, as for `hessian`.

    `tol` adds start vectors until the standard error of the mean eigenvalue is at most this share of its magnitude.
    The mean is the one number whose exact value the runs estimate without bias at any number of steps; the band of the
    figure narrows with it, as the square root of the number of vectors. The axis then has `max_vectors` start vectors,
    and those that were not needed are NaN.

    `blocks` measures the diagonal blocks of the Hessian instead, each by runs of its own, and how different their
    spectra are: the Jensen-Shannon distance of every two, defined in `statistics.block_spectra` (block heterogeneity,
    Zhang et al., arXiv 2402.16788). All runs of a start vector go in step on one gradient graph per mini-batch. A
    product with one block passes a quarter to a third of the graph on average, so that a vector costs steps * (blocks /
    3) products. A block with at most `steps` parameters gets its exact eigenvalues.
    """

    name: ClassVar[str] = "density"
    staged_by: ClassVar[str] = "--tol"
    differentiates: ClassVar[bool] = True
    by_process_group: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("weight_decay",)
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"vectors": 2, "steps": 3}
    presets: ClassVar[Mapping[str, Any]] = {"park2022": {"split": "train", "augment": True, "weight_decay": 0.05}}
    errors_over: ClassVar[str] = "random vectors"
    headlines: ClassVar[Sequence[Headline]] = (
        Headline("heterogeneity", "heterogeneity"), Headline("shape_heterogeneity", "shape_heterogeneity"),
        Headline("mean", "mean", reading=FLATTER), Headline("smallest", "smallest"), Headline("largest", "largest"),
    )  # fmt: skip

    vectors: Annotated[int, "random start vectors"] = 8
    tol: Annotated[
        float, "add start vectors until the standard error is this share of the mean eigenvalue; 0: exactly --vectors"
    ] = 0.0
    max_vectors: Annotated[int, "with --tol: most start vectors"] = 256
    steps: Annotated[int, "Lanczos steps, and so nodes, per vector; at most the number of parameters"] = 40
    hvp: Annotated[Hvp, HVP_HELP] = "auto"
    kinks: Annotated[Kinks, KINKS_HELP] = "double"
    params: Annotated[str, PARAMS_HELP] = ""
    blocks: Annotated[
        block_diagonal.BlockKind,
        f"spectra of the Hessian's diagonal blocks and their distances; {block_diagonal.BLOCK_KINDS}",
    ] = "none"
    seed: Annotated[int, "seed of the start vectors"] = 0

    def __post_init__(self) -> None:
        require(0 <= self.tol < 1, "tol", self.tol, "at least 0 and below 1")
        at_least("vectors", self.vectors, 2 if self.tol else 1)  # one has no error
        at_least("max_vectors", self.max_vectors, self.vectors if self.tol else 1)
        at_least("steps", self.steps, 2)
        one_of("hvp", self.hvp, get_args(Hvp))
        one_of("kinks", self.kinks, get_args(Kinks))
        regular_expression("params", self.params)
        one_of("blocks", self.blocks, get_args(block_diagonal.BlockKind))
        if self.blocks != "none" and self.tol:
            raise OptionError("--tol is for the whole Hessian; with --blocks give the number of --vectors")
        if self.blocks != "none" and self.hvp not in ("auto", "double-backward"):
            raise OptionError(
                f"--hvp {self.hvp} makes products of the whole Hessian; with --blocks use auto or double-backward"
            )

    def plan(self, subject: Subject) -> Plan:
        parameters = matching(subject.parameters, self.params)  # fails before any work where nothing matches
        if self.blocks != "none":
            return block_diagonal.block_plan(
                block_diagonal.Partition.of(parameters, self.blocks), self.vectors, self.steps
            )
        eigenvalue, node = "loss per squared weight", ("node",)
        met = Quantity("1 if mean_se / |mean| is at most tol, 0 if max_vectors ended the run before")
        return Plan(
            over={"vector": np.arange(self.max_vectors if self.tol else self.vectors)},
            axes={"node": np.arange(self.steps)},
            quantities={
                "nodes": Quantity("node of the quadrature: a Ritz value, ascending", eigenvalue, node),
                "weights": Quantity("its weight; those of a vector sum to 1", dims=node),
                "matvecs": Quantity("Hessian products with all samples spent"),
                "hvp": Quantity(CODES_MEANING),
            },
            summaries={
                "mean": Quantity(
                    "mean eigenvalue: the trace over the number of parameters", eigenvalue, error="start vectors"
                ),
                "mean_square": Quantity(
                    "mean squared eigenvalue: the squared Frobenius norm over the number of parameters",
                    f"({eigenvalue})^2",
                    bounds="positive",
                    error="start vectors",
                ),
                "largest": Quantity("largest node", eigenvalue),
                "smallest": Quantity("smallest node", eigenvalue),
                **({"within_tol": met} if self.tol else {}),
            },
            about={"vector": Quantity("start vector")},
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The backend changes nothing but rounding; without a target there is no cap on the vectors."""
        return {"hvp": None, **({} if self.tol else {"max_vectors": None})}

    def autotune(self, subject: Subject) -> dict[str, str]:
        if self.blocks != "none":
            return {}
        return autotuned(subject, self.params, self.hvp, planned=self._planned(subject, self.vectors), kinks=self.kinks)

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """One start vector after the other, with products prepared once."""
        parameters = matching(subject.parameters, self.params)
        hvp: Hvp = self.hvp if self.blocks == "none" else "double-backward"
        curved = curvature(subject, parameters, hvp, planned=self._planned(subject, len(units)), kinks=self.kinks)
        report_products(per_unit=self._passes(subject) * self.steps)
        if self.blocks != "none":
            yield from self._of_blocks(curved, units)
            return
        product = mini_batch_means.over_mini_batches(curved)
        for unit in units:
            start = random_unit(curved.size, unit.seed(self.seed), device=subject.device, dtype=subject.dtype)
            yield {**self._quadrature(product, start), "hvp": CODES.index(curved.hvp)}

    def _of_blocks(self, curved: operator.Curvature, units: Sequence[Unit]) -> Iterator[Values]:
        """The quadratures of all blocks from one start vector after the other."""
        partition = block_diagonal.Partition.of(curved.parameters, self.blocks)
        product = mini_batch_means.over_mini_batches(curved.of(blocks=partition.members))
        like = next(iter(curved.parameters.values()))
        for unit in units:
            found = block_diagonal.block_quadratures(
                product, partition, self.steps, seed=unit.seed(self.seed), like=like
            )
            rows = [self._row(one, exact=size <= self.steps) for one, size in zip(found, partition.sizes, strict=True)]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _planned(self, subject: Subject, vectors: int) -> hvp_reference.PlannedProducts:
        size = sum(p.numel() for p in matching(subject.parameters, self.params).values())
        stored = min(self.steps, size) * size * subject.dtype.itemsize
        return hvp_reference.PlannedProducts(self._passes(subject), vectors * self.steps, rebuilt=True, stored=stored)

    def _passes(self, subject: Subject) -> int:
        """Mini-batches that this process passes over for one product."""
        return -(-len(subject.batches) // subject.processes.size)

    def _quadrature(self, product: Callable[[Tensor], Tensor], start: Tensor) -> dict[str, Any]:
        try:
            # tol 0: all nodes are wanted, and nothing stops the run before its last step.
            found = lanczos(product, start, self.steps, tol=0.0, max_steps=self.steps)
        except FloatingPointError:
            return self._row(None)
        return self._row(found)

    def _row(self, found: Spectrum | None, *, exact: bool = False) -> dict[str, Any]:
        """What is stored of one run; of an exact one, whose nodes are all eigenvalues, each has the same weight."""
        nodes, weights = np.full((2, self.steps), np.nan)
        if found is None:
            return {"nodes": nodes, "weights": weights, "matvecs": np.float64(math.nan)}
        # On breakdown the search continued with a random vector: the nodes from there on have no weight.
        known = np.full(len(found.nodes), True) if exact else found.weights > np.finfo(np.float64).tiny
        count = int(known.sum())
        nodes[:count] = found.nodes[known]
        weights[:count] = 1 / count if exact else found.weights[known] / found.weights[known].sum()
        return {"nodes": nodes, "weights": weights, "matvecs": np.float64(found.products)}

    def stage(self, data: Mapping[str, np.ndarray]) -> Stage | None:
        """With `tol` the start vectors that its target needs by the error so far; else all at once."""
        if not self.tol:
            return None
        done, count = data["done"] == 1, self.vectors
        while True:
            if missing := [(int(i),) for i in np.flatnonzero(~done[:count])]:
                return Stage(missing, {})
            wanted = self._wanted({**data, "done": np.arange(len(done)) < count}, count)  # as a stopped run decided
            if wanted == count:
                break
            count = wanted
        return Stage([], {name: np.full_like(data[name], np.nan) for name in MEASURED})

    def _wanted(self, data: Mapping[str, np.ndarray], count: int) -> int:
        """Start vectors by the error of the first `count`: as many where the target, or the cap, is met."""
        found = self.reduce(data)
        if not found or not math.isfinite(found["mean_se"]):
            return count
        error, target = found["mean_se"], self.tol * abs(found["mean"])
        counts = np.array([count])
        (wanted,) = trace_estimators.rounds_for(error**2 * counts, counts, target, most=self.max_vectors).tolist()
        if error > target and wanted == count:
            times = (error / target) ** 2 if target else math.inf
            _log.warning(
                "density: the standard error of the mean eigenvalue is %.2g of it, above --tol %g, at the cap of "
                "--max-vectors %d; about --max-vectors %.2g would meet it", error / max(abs(found["mean"]), 1e-300),
                self.tol, self.max_vectors, times * count,
            )  # fmt: skip
        return int(wanted)

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The first two moments and both ends, over all finished start vectors; of blocks also their distances."""
        if self.blocks != "none":
            return block_diagonal.block_summaries(data)
        known = (data["done"] == 1) & np.isfinite(data["nodes"][:, 0])
        nodes, weights = data["nodes"][known], data["weights"][known]
        if not len(nodes):
            return {}
        mean, error = mean_and_standard_error(np.nansum(nodes * weights, axis=1))
        met = {"within_tol": float(error <= self.tol * abs(mean))} if self.tol else {}
        ends = {"largest": float(np.nanmax(nodes)), "smallest": float(np.nanmin(nodes))}
        square, square_error = mean_and_standard_error(np.nansum(nodes**2 * weights, axis=1))
        squares = {"mean_square": square, "mean_square_se": square_error}
        counts = dict.fromkeys(("mean_se.n", "mean_square_se.n"), len(nodes))  # without vectors that overflowed
        return {"mean": mean, "mean_se": error, **squares, **ends, **met, **counts}

"""Measure the max-eigenvalue spectrum of the Hessian, per mini-batch (Park & Kim, arXiv 2105.12639, Algorithm 1)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from landscape.curvature import lanczos, preconditioner, pyhessian_engine, stopping, stored_spectrum
from landscape.curvature.spectrum import VECTOR_RESIDUAL, Request, spectra, spectrum
from landscape.curvature.stored_spectrum import Engine, Scope, check, require_storable
from landscape.headline import Headline
from landscape.probe import Plan, Probe, Quantity, Unit, Values, report_products
from landscape.products import hvp_reference, mini_batch_means
from landscape.products.hvp_backends import CODES, HVP_HELP, KINKS_HELP, Hvp, Kinks, autotuned, curvature
from landscape.products.kinks import PatternCache, cache_of_all
from landscape.products.micro_batches import announce, mini_batches_at_once, side_by_side
from landscape.products.operator import Curvature, Matrix, Operator
from landscape.products.parameter_selection import PARAMS_HELP, Blocks, matching
from landscape.subject import losses, optimizers
from landscape.subject.subject import Subject, more_samples

PARK_2022 = {"top": 5, "batch_size": 16, "samples": "10%", "split": "train", "augment": True, "weight_decay": 0.05}


@dataclass(frozen=True)
class Hessian(Probe):
    """The top eigenvalues of the Hessian of loss + weight decay on each mini-batch, for all trainable parameters.

    Largest MAGNITUDE by default: a "max" eigenvalue may be negative. Lanczos with full reorthogonalisation from a
    random start, tested at each step: 12 to 25 products per mini-batch, a product about 2 gradients. It stops where the
    estimated relative error min(r, r^2 / gap) of every value is below `tol`, r its residual, and where an eigenvector
    further out could have little more than nothing of the start vector; see `curvature.stopping`.

    `operator` selects another matrix: the Gauss-Newton part of the Hessian, or the EMPIRICAL Fisher, the mean over
    samples of g g', g the gradient of a sample's loss at its true label. Neither has negative eigenvalues.

    Operator preconditioned is P^-1/2 H P^-1/2, P the preconditioner of the optimiser's state; the threshold at which
    that optimiser is unstable is stored beside it, see `curvature.preconditioner`.

    `per_layer` measures the diagonal blocks: one spectrum per module with parameters of its own, the others fixed.
    A block with fewer rows than `top` has NaN after its eigenvalues.

    `scope` dataset measures one spectrum, that of the mean over all samples. A larger batch size makes it faster
    without changing it: mini-batches, a last smaller one too, weigh by their samples. A product then passes over all
    of them and rebuilds each graph, one more gradient.

    `kinks` double fixes the activation pattern (ReLU and its relatives, max pooling) to that of a forward pass in
    double precision, so that every backend gives the same eigenvalues, to 1e-5; with single, units within rounding of
    a kink land on either side, which was seen to change an eigenvalue by 1e-3. The pattern is not fixed (with a
    message) for a model that double precision changes or cannot run, nor for a mean over so many samples that their
    patterns, a byte per unit, take more than 2 GiB.
    """

    name: ClassVar[str] = "hessian"
    differentiates: ClassVar[bool] = True
    by_process_group: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    batch_size: ClassVar[int] = 16
    smallest: ClassVar[Mapping[str, Any]] = {"top": 2, "batches": 2, "max_products": 12}
    presets: ClassVar[Mapping[str, Any]] = {"park2022": PARK_2022}
    errors_over: ClassVar[str] = "mini-batches"
    headlines: ClassVar[Sequence[Headline]] = stored_spectrum.HEADLINES

    top: Annotated[int, "eigenvalues per mini-batch (per end)"] = 5
    scope: Annotated[Scope, "batch: a spectrum per mini-batch; dataset: one for the mean over all samples"] = "batch"
    batches: Annotated[int, "number of mini-batches; default 0: all"] = 0
    which: Annotated[stopping.Which, "LM largest magnitude, LA largest, SA smallest, both ends"] = "LM"
    tol: Annotated[float, "estimated relative error of all eigenvalues to stop at (pyhessian: their change)"] = 1e-4
    tol_residual: Annotated[float, "relative residual to stop at instead; default 0: by --tol"] = 0.0
    ends: Annotated[float, "relative residual also of the largest and smallest eigenvalue; default 1: any"] = 1.0
    operator: Annotated[
        Matrix, "hessian, ggn (Gauss-Newton), fisher (empirical: mean of g g'), or preconditioned (by the optimiser)"
    ] = "hessian"
    optimizer: Annotated[str, optimizers.OPTIMIZER_HELP] = ""
    optimizer_arg: Annotated[tuple[str, ...], optimizers.OPTIMIZER_ARG_HELP] = ()
    optimizer_state: Annotated[bool, optimizers.OPTIMIZER_STATE_HELP] = True
    hvp: Annotated[Hvp, HVP_HELP] = "auto"
    kinks: Annotated[Kinks, KINKS_HELP] = "double"
    params: Annotated[str, PARAMS_HELP] = ""
    per_layer: Annotated[bool, "one spectrum per layer, of its own parameters"] = False
    max_products: Annotated[int, "cap on products per mini-batch (pyhessian: per eigenvalue), at least top + 1"] = 200
    engine: Annotated[Engine, "lanczos, or as a cross-check pyhessian: power iteration, LM only, may miss"] = "lanczos"
    eigenvectors: Annotated[bool, "also store the eigenvectors: 8 bytes per parameter, rank and mini-batch"] = False
    verify: Annotated[bool, "also search for copies of equal eigenvalues, with a quarter more products"] = True
    seed: Annotated[int, "seed of the start vectors"] = 0

    def __post_init__(self) -> None:
        check(self)
        _ = self._optimizer

    def plan(self, subject: Subject) -> Plan:
        blocks = self._blocks(subject)
        blocks.require_rows(self.top)
        whole = "mini-batch" if self.scope == "batch" else "whole set of samples"
        count = self._count(subject)
        batches = np.arange(count if self.scope == "batch" else 1)
        axes = {"rank": np.arange(self._request.ranks), "node": np.arange(self._nodes)}
        if self.eigenvectors:
            axes["parameter"] = np.arange(int(blocks.sizes.max()))
            require_storable(8 * len(batches) * len(axes["rank"]) * len(axes["parameter"]))
        return Plan(
            over={"batch": batches} | blocks.axis,
            axes=axes,
            quantities=stored_spectrum.spectrum_quantities(
                self.operator, whole=whole, loss_units=subject.meaning.units, request=self._request
            ),
            labels=blocks.labels,
            facts=self._facts(subject),
            summaries=stored_spectrum.summary_quantities(self.operator, tuple(blocks.axis)),
            about={
                "batch": Quantity(whole),
                "group": Quantity("group of parameters"),
                "rank": Quantity(f"rank by {self.which}"),
                "node": Quantity("node, from the smallest"),
            },
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The optimiser as it is used; the backend changes nothing but rounding."""
        unused = dict.fromkeys(("hvp", "optimizer", "optimizer_arg", "optimizer_state"))
        return unused | (
            optimizers.optimizer_identity(subject, self._optimizer) if self.operator == "preconditioned" else {}
        )

    def autotune(self, subject: Subject) -> dict[str, str]:
        if self._double_backward:
            return {}
        count = self._count(subject)
        with self._at_once(subject, count) as at_once:
            passes = count if self.scope == "batch" else self._passes(subject)
            planned = self._planned(passes, at_once, self._stored(subject))
            return autotuned(subject, self.params, self.hvp, planned=planned, kinks=self._kinks, batched=not self.whole)

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches in threads side by side, or in one product; products are prepared once for all of one shape."""
        batches = [list(of_one) for _, of_one in groupby(units, lambda unit: unit.index[0])]
        with self._at_once(subject, len(batches)) as at_once:
            yield from self._swept(subject, units, batches, at_once)

    def _swept(
        self, subject: Subject, units: Sequence[Unit], batches: Sequence[Sequence[Unit]], at_once: int
    ) -> Iterator[Values]:
        blocks = self._blocks(subject)
        hvp = "double-backward" if self._double_backward else self.hvp
        passes = len(units) if self.scope == "batch" else self._passes(subject)
        planned = self._planned(passes, at_once, self._stored(subject))
        how: dict[str, Any] = {"planned": planned, "operator": self._differentiated, "kinks": self._kinks}
        how["batched"] = not self.whole
        curved = [curvature(subject, parameters, hvp, **how) for parameters in blocks.groups.values()]
        shared: PatternCache | None = None
        if self.per_layer and self.scope == "dataset" and curved[0].fixed:
            shared = cache_of_all(curved[0].pattern(0), passes, subject.device)

        def measured(of_one: Sequence[Unit]) -> Iterator[Values]:
            own, patterns = curved, shared or PatternCache()
            if self.per_layer:  # the layers of a mini-batch follow each other and share its activation pattern
                own = [replace(one, patterns=patterns) for one in curved]
            return (self._one(own[blocks.position(unit.index)], unit) for unit in of_one)

        report_products(per_unit=self._planned(passes if self.scope == "dataset" else 1).total)
        if not curved[0].batched:
            announce(subject, at_once)
            yield from side_by_side(batches, measured, at_once, crowded=lambda: any(c.exceeds_memory for c in curved))
            return
        for at in range(0, len(units), curved[0].batched):
            yield from self._side_by_side(curved[0], units[at : at + curved[0].batched])

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """NEP and APE over all finished mini-batches, or those of each layer, with their intervals."""
        return stored_spectrum.summaries(data, per_layer=self.per_layer)

    @property
    def _kinks(self) -> Kinks:
        return self.kinks if self.engine == "lanczos" else "single"

    @property
    def _double_backward(self) -> bool:
        """Whether double backward is required: for PyHessian's residuals, other matrices, or many small blocks."""
        return self.engine == "pyhessian" or self._differentiated != "hessian" or self.per_layer

    @property
    def whole(self) -> bool:
        """Whether there is one spectrum, of the mean over all samples."""
        return self.scope == "dataset"

    @property
    def _differentiated(self) -> Operator:
        return "hessian" if self.operator == "preconditioned" else self.operator

    @property
    def _optimizer(self) -> optimizers.OptimizerOptions:
        return optimizers.OptimizerOptions(self.optimizer, tuple(self.optimizer_arg), self.optimizer_state)

    def _preconditioner(self, subject: Subject) -> preconditioner.Preconditioner | None:
        return preconditioner.optimizer_of(subject, self._optimizer)[0] if self.operator == "preconditioned" else None

    def _facts(self, subject: Subject) -> dict[str, str]:
        if self.operator != "preconditioned":
            return {}
        known, optimizer = preconditioner.optimizer_of(subject, self._optimizer)
        return {"optimizer": optimizer, "stability": known.definition}

    @property
    def _nodes(self) -> int:
        """Most nodes of a search: it stores those before its first restart."""
        return max(self.max_products, self.top + 1)

    @property
    def _request(self) -> Request:
        """Eigenvectors need a residual too, since their errors are r / gap; PyHessian's values are judged by theirs."""
        residual = self.tol_residual or (VECTOR_RESIDUAL if self.eigenvectors else None)
        tol = None if self.tol_residual else self.tol
        if self.engine == "pyhessian":
            tol, residual = None, self.tol
        verify = self.verify and self.engine == "lanczos"
        hidden = self.operator == "preconditioned" and self.which == "LM"  # the largest eigenvalue may be none of these
        ends = min(self.ends, preconditioner.ENDS) if hidden else self.ends
        return Request(self.top, self.which, tol, residual, ends, self._nodes, self.eigenvectors, verify)

    def _at_once(self, subject: Subject, batches: int) -> AbstractContextManager[int]:
        """PyHessian's iteration writes gradients to the model, and other matrices call a user's loss at any time."""
        independent = self.scope == "batch" and self.engine == "lanczos"
        independent &= self._differentiated == "hessian" or subject.losses in losses.MEANINGS
        return mini_batches_at_once(subject, batches if independent else 1, vectors=self._nodes)

    def _planned(self, batches: int, at_once: int = 1, stored: int = 0) -> hvp_reference.PlannedProducts:
        """About as many products as random starts were seen to take on trained networks."""
        products = min(10 + 2 * self._request.ranks, self.max_products) * (5 if self._request.searched else 4) // 4
        dataset = self.scope == "dataset"
        return hvp_reference.PlannedProducts(batches, products, rebuilt=dataset, at_once=at_once, stored=stored)

    def _stored(self, subject: Subject) -> int:
        """Bytes of the vectors that a search keeps, of the largest block of parameters."""
        return self._request.stored(int(self._blocks(subject).sizes.max()), subject.dtype, subject.device)

    def _passes(self, subject: Subject) -> int:
        """Mini-batches that this process passes over for one product of all samples."""
        return -(-self._count(subject) // subject.processes.size)

    def _blocks(self, subject: Subject) -> Blocks:
        return Blocks.of(matching(subject.parameters, self.params), per_layer=self.per_layer)

    def _count(self, subject: Subject) -> int:
        usable = mini_batch_means.whole_batches(subject) if self.scope == "batch" else len(subject.batches)
        if self.batches > usable:
            whole = "whole " if self.scope == "batch" else ""
            ways = more_samples(subject, *([f"give at most --batches {usable}"] if usable else []))
            raise ValueError(
                f"--batches {self.batches} exceeds the {usable} {whole}mini-batches of the samples; {ways}"
            )
        return self.batches or usable

    def _one(self, curved: Curvature, unit: Unit) -> dict[str, Any]:
        product, loss = self._product(curved, unit)
        seed, request = unit.seed(self.seed), self._request.capped(curved.size)
        try:
            if self.engine == "pyhessian":
                parameters, i = list(curved.parameters.values()), unit.index[0]
                found: lanczos.Spectrum | None = pyhessian_engine.power_iteration(
                    curved.subject, i, parameters, product, self.top,
                    tol=self.tol, iterations=self.max_products, seed=seed,
                )  # fmt: skip
            else:
                found = spectrum(product, request, curved.size, seed, _weight(curved))
        except FloatingPointError:
            found = None
        return self._values(found, loss, curved)

    def _side_by_side(self, curved: Curvature, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        """Several mini-batches at once; a last incomplete set is filled up with copies of its last one."""
        filled = [*units, *[units[-1]] * (curved.batched - len(units))]
        indices = [unit.index[0] for unit in filled]
        if not curved.fits_batched(indices):
            yield from (self._one(curved, unit) for unit in units)
            return
        product = curved.batched_product(indices)
        seen, seeds = self._as_seen(product, curved), [unit.seed(self.seed) for unit in filled]
        found = spectra(seen, self._request.capped(curved.size), curved.size, seeds, _weight(curved))
        for _, one, loss in zip(units, found, product.values, strict=False):
            yield self._values(one, loss, curved)

    def _product(self, curved: Curvature, unit: Unit) -> tuple[Callable[[Tensor], Tensor], float]:
        if self.scope == "batch":
            product = curved.product(unit.index[0])
            return self._as_seen(product, curved), product.value
        subject, count = curved.subject, self._count(curved.subject)
        whole = mini_batch_means.over_mini_batches(curved, range(count))
        return self._as_seen(whole, curved), mini_batch_means.mean_loss(subject, range(count))

    def _as_seen(self, product: Callable[[Tensor], Tensor], curved: Curvature) -> Callable[[Tensor], Tensor]:
        known = self._preconditioner(curved.subject)
        return product if known is None else known.of(product, curved.parameters)

    def _values(self, found: lanczos.Spectrum | None, loss: float, curved: Curvature) -> dict[str, Any]:
        values = stored_spectrum.spectrum_values(found, self._request, nodes=self._nodes, size=curved.size)
        if (known := self._preconditioner(curved.subject)) is not None:
            values |= preconditioner.stability_values(values, known.threshold)
        return {**values, "loss": loss, "hvp": CODES.index(curved.hvp)}


def _weight(curved: Curvature) -> Tensor:
    return next(iter(curved.subject.parameters.values()))

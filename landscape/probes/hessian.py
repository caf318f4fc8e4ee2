"""Max-eigenvalue spectrum of the Hessian, per mini-batch (Park & Kim, arXiv 2105.12639, Algorithm 1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from landscape.curvature import CODES, Curvature, Hvp, Operator, curvature, over_all_samples
from landscape.linalg.lanczos import Spectrum, Which, lanczos
from landscape.linalg.power_iteration import power_iteration
from landscape.linalg.sharpness import summaries
from landscape.linalg.vector import random_unit
from landscape.linalg.verify import verified
from landscape.probe import (
    OptionError,
    Plan,
    Quantity,
    Unit,
    Values,
    at_least,
    derived_seed,
    one_of,
    regular_expression,
)
from landscape.subject import Subject, logits_in

Scope = Literal["batch", "dataset"]
Engine = Literal["lanczos", "pyhessian"]
LARGEST_RESULT = 2**30  # bytes of eigenvectors
MATRICES: Mapping[Operator, tuple[str, str]] = {  # long name and units of the eigenvalues
    "hessian": ("Hessian", "loss per squared weight"),
    "ggn": ("Gauss-Newton", "loss per squared weight"),
    "fisher": ("empirical Fisher", "squared loss per squared weight"),
}


@dataclass(frozen=True)
class Hessian:
    """The top eigenvalues of the Hessian of loss + weight decay on each mini-batch, for all trainable parameters.

    Largest MAGNITUDE by default: a "max" eigenvalue may be negative. Lanczos with full reorthogonalisation from a
    random start, tested at each step: 12 to 20 products per mini-batch, a product about 2.5 gradients.

    `operator` takes another matrix: the Gauss-Newton part of the Hessian, or the EMPIRICAL Fisher, the mean over
    samples of g g', g the gradient of a sample's loss at its true label. Neither has negative eigenvalues.

    `scope` dataset has one spectrum, that of the mean over all samples, which a larger batch size makes faster without
    changing it: mini-batches, a last smaller one too, weigh by their samples. A product then passes over all of them
    and rebuilds each graph, one more gradient.
    """

    name: ClassVar[str] = "hessian"
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    batch_size: ClassVar[int] = 16
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "park2022": {
            "top": 5,
            "batch_size": 16,
            "samples": "10%",
            "split": "train",
            "augment": True,
            "weight_decay": 0.05,
        }
    }

    top: Annotated[int, "eigenvalues per mini-batch (for both: per end)"] = 5
    scope: Annotated[Scope, "batch: a spectrum per mini-batch; dataset: one of the mean over all samples"] = "batch"
    batches: Annotated[int, "mini-batches; 0 takes all that the samples give"] = 0
    which: Annotated[Which, "LM largest magnitude, LA largest, SA smallest, both ends"] = "LM"
    tol: Annotated[float, "relative residual at which an eigenvalue counts as converged"] = 1e-3
    ends: Annotated[float, "relative residual to which both algebraic ends are followed too; 1 asks nothing"] = 0.03
    operator: Annotated[Operator, "hessian, ggn Gauss-Newton, fisher empirical (mean of g g' over samples)"] = "hessian"
    hvp: Annotated[Hvp, "how products are made; auto tries and takes the fastest, equal to rounding"] = "kept"
    params: Annotated[str, "regular expression: only parameters whose name it finds"] = ""
    max_products: Annotated[int, "cap on products per mini-batch, top + 1 at least; of pyhessian per eigenvalue"] = 200
    engine: Annotated[Engine, "lanczos, or for a cross-check pyhessian: power iteration, LM only, may miss"] = "lanczos"
    eigenvectors: Annotated[bool, "store the eigenvectors too: 8 bytes per parameter, rank and mini-batch"] = False
    verify: Annotated[bool, "search beside what was found for values missed; about as many products again"] = False
    seed: Annotated[int, "seed of the start vectors"] = 0

    def __post_init__(self) -> None:
        at_least("top", self.top, 1)
        at_least("batches", self.batches, 0)
        at_least("max_products", self.max_products, 2)
        one_of("which", self.which, get_args(Which))
        one_of("scope", self.scope, get_args(Scope))
        one_of("operator", self.operator, get_args(Operator))
        one_of("hvp", self.hvp, get_args(Hvp))
        one_of("engine", self.engine, get_args(Engine))
        if self.operator != "hessian" and self.hvp not in ("auto", "kept"):
            raise OptionError(f"--hvp {self.hvp} makes products of the Hessian only; with --operator {self.operator} "
                              "ask for auto or kept")  # fmt: skip
        if self.engine == "pyhessian":
            self._refuse_beyond_pyhessian()
        regular_expression("params", self.params)
        if not 0 < self.tol < 1:
            raise OptionError(f"--tol {self.tol} is out of range; ask for a value between 0 and 1")
        if not 0 < self.ends <= 1:
            raise OptionError(f"--ends {self.ends} is out of range; ask for a value above 0, at most 1")

    def _refuse_beyond_pyhessian(self) -> None:
        beyond = [
            ("which", self.which, self.which != "LM"),
            ("operator", self.operator, self.operator != "hessian"),
            ("scope", self.scope, self.scope != "batch"),
            ("hvp", self.hvp, self.hvp not in ("auto", "kept")),
            ("verify", "", self.verify),
        ]
        for name, value, refused in beyond:
            if refused:
                raise OptionError(f"--engine pyhessian cannot do --{name} {value}".rstrip() + "; leave one of them out")

    def plan(self, subject: Subject) -> Plan:
        size = sum(p.numel() for p in self._parameters(subject).values())
        if self.top > size:
            raise ValueError(f"--top {self.top} exceeds the {size} parameters of the model; ask for at most {size}")
        count = self._count(subject)
        rank = ("rank",)
        matrix, units = MATRICES[self.operator]
        over = "mini-batch" if self.scope == "batch" else "whole set of samples"
        units_of_work = np.arange(count if self.scope == "batch" else 1)
        axes = {"rank": np.arange(self.top * (2 if self.which == "both" else 1))}
        quantities = {
            "eigenvalue": Quantity(f"{matrix} eigenvalue", units, rank),
            "residual": Quantity("residual ||Hv - lambda v||", units, rank),
            "converged": Quantity("1 where residual <= tol |eigenvalue|", dims=rank),
            "largest": Quantity("algebraically largest eigenvalue", units),
            "smallest": Quantity("algebraically smallest eigenvalue", units),
            "largest_residual": Quantity("residual of the largest eigenvalue", units),
            "smallest_residual": Quantity("residual of the smallest eigenvalue", units),
            "loss": Quantity(f"loss of the {over}", "nats"),
            "matvecs": Quantity(f"matrix products spent, each with the {over}"),
            "hvp": Quantity(f"how products were made: {', '.join(f'{i} {kind}' for i, kind in enumerate(CODES))}"),
        }
        if self.verify:
            quantities["missed"] = Quantity("eigenvalues that only the search beside the others found")
        if self.eigenvectors:
            axes["parameter"] = np.arange(size)
            quantities["eigenvector"] = Quantity(
                "unit eigenvector, parameters one after the other as in named_parameters()", dims=("rank", "parameter")
            )
            self._refuse_too_large(8 * len(units_of_work) * len(axes["rank"]) * size)
        return Plan(
            over={"batch": units_of_work},
            axes=axes,
            quantities=quantities,
            summaries={
                "nep": Quantity("share of negative eigenvalues"),
                "nep_low": Quantity("lower end of the 95 % bootstrap interval of nep over mini-batches"),
                "nep_high": Quantity("upper end of the 95 % bootstrap interval of nep over mini-batches"),
                "ape": Quantity("mean of the positive eigenvalues", units),
                "ape_low": Quantity("lower end of the 95 % bootstrap interval of ape", units),
                "ape_high": Quantity("upper end of the 95 % bootstrap interval of ape", units),
            },
            about={
                "batch": Quantity(over),
                "rank": Quantity(f"rank by {self.which}"),
                "parameter": Quantity("parameter"),
            },
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters without the way products are made, which changes nothing but rounding."""
        return {name: value for name, value in asdict(self).items() if name != "hvp"}

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches one after the other, with products prepared once for all of one shape."""
        hvp = "kept" if self.engine == "pyhessian" else self.hvp  # for the residuals alone
        passes = len(units) if self.scope == "batch" else self._count(subject)
        products = curvature(subject, self._parameters(subject), hvp, batches=passes, operator=self.operator)
        for unit in units:
            yield {**self._spectrum(subject, products, unit), "hvp": CODES.index(products.kind)}

    def _product(self, subject: Subject, products: Curvature, unit: Unit) -> tuple[Callable[[Tensor], Tensor], float]:
        """The operator of a unit and the loss it belongs to."""
        if self.scope == "batch":
            product = products.product(unit.index[0])
            return product, product.value
        count = self._count(subject)
        sizes = np.array([len(subject.batches[i][1]) for i in range(count)])
        with torch.no_grad():
            losses = np.array([subject.loss(i).item() for i in range(count)])
        return over_all_samples(subject, products, batches=count), float(sizes @ losses / sizes.sum())

    def _spectrum(self, subject: Subject, products: Curvature, unit: Unit) -> dict[str, Any]:
        product, loss = self._product(subject, products, unit)
        size = sum(p.numel() for p in products.parameters.values())
        try:
            if self.engine == "pyhessian":
                found, missed = self._by_pyhessian(subject, products, product, unit), 0
            else:
                found, missed = self._by_lanczos(subject, product, size, unit)
        except FloatingPointError:
            return self._not_finite(loss, size)
        values: dict[str, Any] = {
            "eigenvalue": found.values,
            "residual": found.residuals,
            "converged": found.converged,
            "largest": found.largest,
            "smallest": found.smallest,
            "largest_residual": found.ends[0],
            "smallest_residual": found.ends[1],
            "loss": loss,
            "matvecs": found.products,
        }
        if self.verify:
            values["missed"] = missed
        if self.eigenvectors:
            assert found.vectors is not None
            values["eigenvector"] = found.vectors.double().cpu().numpy()
        return values

    def _by_lanczos(
        self, subject: Subject, product: Callable[[Tensor], Tensor], size: int, unit: Unit
    ) -> tuple[Spectrum, int]:
        steps, seed = max(self.max_products, self.top + 1), unit.seed(self.seed)
        start = random_unit(size, seed, device=subject.device, dtype=subject.dtype)
        found = lanczos(
            product, start, self.top, which=self.which, tol=self.tol, ends=self.ends, max_steps=steps,
            vectors=self.eigenvectors or self.verify,
        )  # fmt: skip
        if not self.verify:
            return found, 0
        other = derived_seed(seed, "verify")
        checked = verified(product, found, which=self.which, tol=self.tol, max_steps=steps, seed=other)
        return checked.spectrum, checked.missed

    def _by_pyhessian(
        self, subject: Subject, products: Curvature, product: Callable[[Tensor], Tensor], unit: Unit
    ) -> Spectrum:
        def mean_loss(returned: object, targets: Tensor) -> Tensor:
            return subject.losses(logits_in(returned), targets).mean()

        return power_iteration(
            subject.model, mean_loss, subject.batch(unit.index[0]), list(products.parameters.values()), product,
            self.top, shift=subject.weight_decay, tol=self.tol, iterations=self.max_products,
            seed=unit.seed(self.seed),
        )  # fmt: skip

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """NEP and APE over all finished mini-batches, with bootstrap intervals over mini-batches."""
        values = data["eigenvalue"][data["done"] == 1]
        values = values[np.isfinite(values).all(axis=1)]
        return summaries(values)

    def _count(self, subject: Subject) -> int:
        """How many mini-batches are used."""
        usable = len(subject.batches)
        if self.scope == "batch":
            usable = sum(self._is_whole(subject, i) for i in range(usable))
        if self.batches > usable:
            whole = "whole " if self.scope == "batch" else ""
            raise ValueError(
                f"--batches {self.batches} exceeds the {usable} {whole}mini-batches of the samples; raise --samples"
            )
        return self.batches or usable

    @staticmethod
    def _is_whole(subject: Subject, i: int) -> bool:
        """A last smaller batch has another spectrum; it is left out unless it is the only one."""
        last = len(subject.batches) - 1
        return i < last or last == 0 or len(subject.batches[i][1]) == len(subject.batches[0][1])

    def _parameters(self, subject: Subject) -> dict[str, Any]:
        found = {name: p for name, p in subject.parameters.items() if re.search(self.params, name)}
        if not found:
            near = ", ".join(list(subject.parameters)[:5])
            raise ValueError(f"--params {self.params} matches no trainable parameter; there are {near}, ...")
        return found

    @staticmethod
    def _refuse_too_large(size: int) -> None:
        if size > LARGEST_RESULT:
            raise ValueError(
                f"--eigenvectors would store {size / 2**30:.1f} GiB, at most 1 GiB fits a results file; "
                "ask for fewer --batches, a smaller --top, or one block of weights with --params"
            )

    def _not_finite(self, loss: float, size: int) -> dict[str, Any]:
        ranks = np.full(self.top * (2 if self.which == "both" else 1), np.nan)
        values: dict[str, Any] = dict.fromkeys(("largest", "smallest", "largest_residual", "smallest_residual"), np.nan)
        values |= {"eigenvalue": ranks, "residual": ranks, "converged": np.zeros_like(ranks)}
        values |= {"loss": loss, "matvecs": 1}
        if self.verify:
            values["missed"] = np.nan
        if self.eigenvectors:
            values["eigenvector"] = np.full((len(ranks), size), np.nan)
        return values

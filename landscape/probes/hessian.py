"""Max-eigenvalue spectrum of the Hessian, per mini-batch (Park & Kim, arXiv 2105.12639, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from landscape.curvature.lanczos import ROUNDING, Spectrum, Which
from landscape.curvature.operator import CODES, HOW, Curvature, Hvp, Kinks, Last, Operator, curvature, over_all_samples
from landscape.curvature.parameter_selection import by_module, matching
from landscape.curvature.pyhessian_engine import power_iteration
from landscape.curvature.spectrum import Found, Request, spectra, spectrum, start_of, summaries, values_of
from landscape.options import OptionError, at_least, one_of, regular_expression, require
from landscape.probe import Plan, Probe, Quantity, Unit, Values
from landscape.subject.outputs import logits_in
from landscape.subject.subject import Subject

Scope = Literal["batch", "dataset"]
Engine = Literal["lanczos", "pyhessian"]
LARGEST_RESULT = 2**30  # bytes of eigenvectors
MATRICES: Mapping[Operator, tuple[str, str]] = {  # long name and units of the eigenvalues
    "hessian": ("Hessian", "loss per squared weight"),
    "ggn": ("Gauss-Newton", "loss per squared weight"),
    "fisher": ("empirical Fisher", "squared loss per squared weight"),
}
SUMMARIES = ("nep", "nep_low", "nep_high", "ape", "ape_low", "ape_high")


@dataclass(frozen=True)
class Hessian(Probe):
    """The top eigenvalues of the Hessian of loss + weight decay on each mini-batch, for all trainable parameters.

    Largest MAGNITUDE by default: a "max" eigenvalue may be negative. Lanczos with full reorthogonalisation from a
    random start, tested at each step: 12 to 20 products per mini-batch, a product about 2 gradients.

    `operator` takes another matrix: the Gauss-Newton part of the Hessian, or the EMPIRICAL Fisher, the mean over
    samples of g g', g the gradient of a sample's loss at its true label. Neither has negative eigenvalues.

    `per_layer` has the diagonal blocks: one spectrum per module with parameters of its own, the others standing still.
    A block with fewer rows than `top` has NaN behind its eigenvalues.

    `scope` dataset has one spectrum, that of the mean over all samples, which a larger batch size makes faster without
    changing it: mini-batches, a last smaller one too, weigh by their samples. A product then passes over all of them
    and rebuilds each graph, one more gradient.

    `kinks` double puts units of a ReLU, its relatives and max pooling on those sides of their kinks that a forward pass
    in double precision finds, so that every way of making products has the same eigenvalues, to 1e-5; single leaves
    units within rounding of a kink where they come to lie, which was seen to change an eigenvalue by 1e-3. A mean over
    all samples leaves them there, as does, and says so, a model that is another function in double precision or cannot
    run in it.
    """

    name: ClassVar[str] = "hessian"
    uses: ClassVar[tuple[str, ...]] = ("batch_size", "weight_decay")
    split: ClassVar[str] = "train"
    batch_size: ClassVar[int] = 16
    smallest: ClassVar[Mapping[str, Any]] = {"top": 2, "batches": 2, "max_products": 12}
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
    ends: Annotated[float, "relative residual to which both algebraic ends are followed too; 1 asks nothing"] = 0.1
    operator: Annotated[Operator, "hessian, ggn Gauss-Newton, fisher empirical (mean of g g' over samples)"] = "hessian"
    hvp: Annotated[Hvp, "how products are made; auto tries and takes the fastest, equal to rounding"] = "auto"
    kinks: Annotated[Kinks, "precision that decides on which side of its kink a ReLU is; double adds a pass"] = "double"
    params: Annotated[str, "regular expression: only parameters whose name it finds"] = ""
    per_layer: Annotated[bool, "a spectrum for every layer's own parameters, the others standing still"] = False
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
        one_of("kinks", self.kinks, get_args(Kinks))
        one_of("engine", self.engine, get_args(Engine))
        if self.operator != "hessian" and self.hvp not in ("auto", "kept"):
            raise OptionError(f"--hvp {self.hvp} makes products of the Hessian only; with --operator {self.operator} "
                              "ask for auto or kept")  # fmt: skip
        if self.engine == "pyhessian":
            self._refuse_beyond_pyhessian()
        if self.per_layer:
            self._refuse_beyond_layers()
        regular_expression("params", self.params)
        require(0 < self.tol < 1, "tol", self.tol, "above 0 and below 1")
        require(0 < self.ends <= 1, "ends", self.ends, "above 0 and at most 1")

    def _refuse_beyond_pyhessian(self) -> None:
        beyond = [
            ("which", self.which, self.which != "LM"),
            ("operator", self.operator, self.operator != "hessian"),
            ("scope", self.scope, self.scope != "batch"),
            ("hvp", self.hvp, self.hvp not in ("auto", "kept")),
            ("verify", "", self.verify),
            ("per-layer", "", self.per_layer),
        ]
        for name, value, refused in beyond:
            if refused:
                raise OptionError(f"--engine pyhessian cannot do --{name} {value}".rstrip() + "; leave one of them out")

    def _refuse_beyond_layers(self) -> None:
        if self.hvp not in ("auto", "kept"):
            raise OptionError(f"--hvp {self.hvp} would trace every layer; with --per-layer ask for auto or kept")
        if self.eigenvectors:
            raise OptionError("--per-layer stores no --eigenvectors; ask for one layer with --params")

    def plan(self, subject: Subject) -> Plan:
        groups = self._groups(subject) if self.per_layer else {"": self._parameters(subject)}
        sizes = np.array([sum(p.numel() for p in group.values()) for group in groups.values()])
        size = int(sizes.max())
        if self.top > size:
            whose = "largest layer" if self.per_layer else "model"
            raise ValueError(f"--top {self.top} exceeds the {size} parameters of the {whose}; ask for at most {size}")
        count = self._count(subject)
        rank = ("rank",)
        matrix, units = MATRICES[self.operator]
        whole = "mini-batch" if self.scope == "batch" else "whole set of samples"
        units_of_work = np.arange(count if self.scope == "batch" else 1)
        axes = {"rank": np.arange(self._request.ranks), "node": np.arange(self._nodes)}
        layered: tuple[str, ...] = ("group",) if self.per_layer else ()
        quantities = {
            "eigenvalue": Quantity(f"{matrix} eigenvalue", units, rank),
            "residual": Quantity("residual ||Hv - lambda v||", units, rank),
            "error": Quantity("estimated error min(r, r^2 / gap) of the eigenvalue", units, rank),
            "converged": Quantity("1 where residual <= tol |eigenvalue|", dims=rank),
            "largest": Quantity("algebraically largest eigenvalue", units),
            "smallest": Quantity("algebraically smallest eigenvalue", units),
            "largest_residual": Quantity("residual of the largest eigenvalue", units),
            "smallest_residual": Quantity("residual of the smallest eigenvalue", units),
            "loss": Quantity(f"loss of the {whole}", subject.meaning.units),
            "matvecs": Quantity(f"matrix products spent, each with the {whole}"),
            "nodes": Quantity("Lanczos nodes: Ritz values of the start vector's quadrature", units, ("node",)),
            "weights": Quantity("their weights: the spectral density that the start vector saw", dims=("node",)),
            "hvp": Quantity(HOW),
        }
        if self.verify:
            quantities["missed"] = Quantity("eigenvalues that only the search beside the others found")
        if self.eigenvectors:
            axes["parameter"] = np.arange(size)
            quantities["eigenvector"] = Quantity(
                "unit eigenvector, parameters one after the other as in named_parameters()", dims=("rank", "parameter")
            )
            self._refuse_too_large(8 * len(units_of_work) * len(axes["rank"]) * size)
        over = {"batch": units_of_work} | ({"group": np.arange(len(groups))} if self.per_layer else {})
        names = Quantity("module whose own parameters these are", dims=("group",)), np.array(list(groups))
        numbers = Quantity("parameters of the group", dims=("group",)), sizes
        return Plan(
            over=over,
            axes=axes,
            quantities=quantities,
            labels={"name": names, "size": numbers} if self.per_layer else {},
            summaries={
                "nep": Quantity("share of negative eigenvalues", dims=layered),
                "nep_low": Quantity("lower end of the 95 % bootstrap interval of nep over mini-batches", dims=layered),
                "nep_high": Quantity("upper end of the 95 % bootstrap interval of nep over mini-batches", dims=layered),
                "ape": Quantity("mean of the positive eigenvalues", units, layered),
                "ape_low": Quantity("lower end of the 95 % bootstrap interval of ape", units, layered),
                "ape_high": Quantity("upper end of the 95 % bootstrap interval of ape", units, layered),
            },
            about={
                "batch": Quantity(whole),
                "group": Quantity("group of parameters"),
                "rank": Quantity(f"rank by {self.which}"),
                "node": Quantity("node, from the smallest"),
                "parameter": Quantity("parameter"),
            },
        )

    @property
    def _nodes(self) -> int:
        """Room for the nodes of a search: those of it before a restart."""
        return max(self.max_products, self.top + 1)

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The parameters without the way products are made, which changes nothing but rounding.

        `kinks` came later and enters where it is not at its default, so that older answers stay found.
        """
        left_out = {"hvp"} | ({"kinks"} if self.kinks == Hessian.kinks else set())
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def measure(self, subject: Subject, unit: Unit) -> Values:
        (values,) = self.sweep(subject, [unit])
        return values

    def autotune(self, subject: Subject) -> dict[str, str]:
        """How products are made, chosen once for the whole answer where that is left to a trial."""
        if self.hvp != "auto" or self._plainly:
            return {}
        parameters, count = self._parameters(subject), self._count(subject)
        return {"hvp": curvature(subject, parameters, "auto", batches=count, kinks=self._kinks).kind}

    def resolved(self, subject: Subject, choices: Mapping[str, Any]) -> tuple[Hessian, Subject]:
        """Probe and subject with the choices of a trial."""
        return replace(self, **choices), subject

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        """Mini-batches one after the other or side by side, with products prepared once for all of one shape."""
        hvp = "kept" if self._plainly else self.hvp
        passes = len(units) if self.scope == "batch" else self._count(subject)
        curved = [
            curvature(subject, parameters, hvp, batches=passes, operator=self.operator, kinks=self._kinks)
            for parameters in (self._groups(subject).values() if self.per_layer else [self._parameters(subject)])
        ]
        if self.per_layer:  # the layers of a mini-batch come one after the other, and have their kinks in common
            last: Last = {}
            curved = [replace(one, last=last) for one in curved]
        if not curved[0].together or self.scope == "dataset":
            for unit in units:
                yield self._alone(subject, curved[unit.index[1] if self.per_layer else 0], unit)
            return
        for at in range(0, len(units), curved[0].together):
            yield from self._together(subject, curved[0], units[at : at + curved[0].together])

    @property
    def _kinks(self) -> Kinks:
        """A mean over all samples rebuilds every graph per product, and single units do not count in it."""
        return self.kinks if self.scope == "batch" and self.engine == "lanczos" else "single"

    @property
    def _plainly(self) -> bool:
        """Whether only the plain graph will do: for residuals alone, for other matrices, for many small ones."""
        return self.engine == "pyhessian" or self.operator != "hessian" or self.per_layer

    def _alone(self, subject: Subject, curved: Curvature, unit: Unit) -> dict[str, Any]:
        product, loss = self._product(subject, curved, unit)
        size = sum(p.numel() for p in curved.parameters.values())
        seed, request = unit.seed(self.seed), self._request.capped(size)
        try:
            if self.engine == "pyhessian":
                found: Found | None = Found(self._by_pyhessian(subject, curved, product, unit))
            else:
                found = spectrum(product, request, start_of(size, seed, self._like(subject)), seed)
        except FloatingPointError:
            found = None
        return self._values(found, loss, curved, size)

    def _together(self, subject: Subject, curved: Curvature, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
        """Several mini-batches at once; a last incomplete handful is filled up with copies of its last one."""
        indices = [unit.index[0] for unit in units]
        filled = indices + [indices[-1]] * (curved.together - len(indices))
        if not curved.fits_together(filled):
            for unit in units:
                yield self._alone(subject, curved, unit)
            return
        joint = curved.joint(filled)
        size = sum(p.numel() for p in curved.parameters.values())
        seeds = [unit.seed(self.seed) for unit in units]
        seeds += [seeds[-1]] * (len(filled) - len(seeds))
        starts = [start_of(size, seed, self._like(subject)) for seed in seeds]
        everything = spectra(joint, self._request.capped(size), starts, seeds)
        for _, found, loss in zip(units, everything, joint.values, strict=False):
            yield self._values(found, loss, curved, size)

    def _product(self, subject: Subject, curved: Curvature, unit: Unit) -> tuple[Callable[[Tensor], Tensor], float]:
        """The operator of a unit and the loss it belongs to."""
        if self.scope == "batch":
            product = curved.product(unit.index[0])
            return product, product.value
        count = self._count(subject)
        sizes = np.array([len(subject.batches[i][1]) for i in range(count)])
        with torch.no_grad():
            losses = np.array([subject.loss(i).item() for i in range(count)])
        return over_all_samples(subject, curved, batches=count), float(sizes @ losses / sizes.sum())

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

    @property
    def _request(self) -> Request:
        most = max(self.max_products, self.top + 1)
        return Request(self.top, self.which, self.tol, self.ends, most, vectors=self.eigenvectors, verify=self.verify)

    @staticmethod
    def _like(subject: Subject) -> Tensor:
        return next(iter(subject.parameters.values())).detach()

    def _values(self, found: Found | None, loss: float, curved: Curvature, size: int) -> dict[str, Any]:
        values = values_of(found, self._request, nodes=self._nodes, size=size)
        return {**values, "loss": loss, "hvp": CODES.index(curved.kind)}

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """NEP and APE over all finished mini-batches, or those of each layer, with bootstrap intervals."""
        values = _signed(data)
        if not self.per_layer:
            return _summaries(values, data["done"])
        rows = [_summaries(values[:, g], data["done"][:, g]) for g in range(data["done"].shape[1])]
        return {name: np.array([row.get(name, np.nan) for row in rows]) for name in SUMMARIES}

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

    def _parameters(self, subject: Subject) -> dict[str, Tensor]:
        return matching(subject.parameters, self.params)

    def _groups(self, subject: Subject) -> dict[str, dict[str, Tensor]]:
        return by_module(self._parameters(subject))

    @staticmethod
    def _refuse_too_large(size: int) -> None:
        if size > LARGEST_RESULT:
            raise ValueError(
                f"--eigenvectors would store {size / 2**30:.1f} GiB, at most 1 GiB fits a results file; "
                "ask for fewer --batches, a smaller --top, or one block of weights with --params"
            )


def _signed(data: Mapping[str, np.ndarray]) -> np.ndarray:
    """The eigenvalues, with 0 for those that rounding alone keeps from it: their sign says nothing."""
    values = data["eigenvalue"]
    ends = np.fmax(np.abs(data["largest"]), np.abs(data["smallest"]))[..., None]
    size = np.abs(values)
    nothing = size <= np.minimum(data["residual"], ROUNDING[torch.float32] * np.fmax(ends, size))
    return np.where(nothing, 0.0, values)


def _summaries(eigenvalues: np.ndarray, done: np.ndarray) -> dict[str, float]:
    values = eigenvalues[done == 1]
    return summaries(values[np.isfinite(values).any(axis=1)])

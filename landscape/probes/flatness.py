"""Measure how flat the loss is around the weights, by the common measures (Andriushchenko et al., arXiv 2302.07011)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from landscape.headline import FLATTER, FLATTER_ABOVE, Headline
from landscape.options import OptionError, at_least, did_you_mean, one_of, parse_choices, regular_expression, require
from landscape.probe import NotApplicable, Plan, Probe, Quantity, Unit, Values
from landscape.products import hvp_backends, hvp_reference, mini_batch_means, parameter_selection
from landscape.statistics.flatness import LOSS, MEASURES, OF, OF_VECTORS, SAMPLES, TERM, TERM_SE, TOGETHER
from landscape.statistics.flatness import values as pooled
from landscape.subject import linear_head, weights_cache
from landscape.subject.loading.identity import protocol
from landscape.subject.subject import Subject
from landscape.weight_space.flatness_terms import FlatnessTerms, Product, has_relative_flatness

OF_HESSIAN = ("top-eigenvalue", *OF_VECTORS)
SEARCH = 40  # Hessian products of the top eigenvalue, about
ALL = "all"
_log = logging.getLogger(__name__)

HEADLINE = ("sam", "adaptive-worst-linf", "pac-bayes-sigma", "top-eigenvalue", "trace")  # in one line of text


@dataclass(frozen=True)
class Flatness(Probe):
    """Measures of flatness of the loss, without weight decay, each with its error, definition and invariances.

    The size m of the mini-batches is that of m-sharpness: `sam`, `worst-*` and `average-*` are means over mini-batches,
    each with changes of the weights of its own. The defaults are those of arXiv 2302.07011: 1,024 training samples,
    m = 128, 20 steps, 20 draws, statistics of batch norm frozen. A worst case is a lower bound: what the search found.
    """

    name: ClassVar[str] = "flatness"
    differentiates: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ("batch_size",)
    split: ClassVar[str] = "train"
    smallest: ClassVar[Mapping[str, Any]] = {"steps": 2, "draws": 4, "vectors": 2}
    errors_over: ClassVar[str] = "mini-batches, samples, random vectors or noise draws"
    headlines: ClassVar[Sequence[Headline]] = tuple(
        Headline(one.name, "value", {"measure": one.name}, FLATTER if one.flatter == "lower" else FLATTER_ABOVE,
                 silent=one.name not in HEADLINE)
        for one in MEASURES.values()
    )  # fmt: skip

    measures: Annotated[str, "which measures, such as sam,trace; all: those that apply"] = ALL
    rho: Annotated[str, "other radii than the defaults, such as sam=0.1,worst-l2=1"] = ""
    steps: Annotated[int, "steps of Auto-PGD per mini-batch"] = 20
    draws: Annotated[int, "noise draws of average-* per mini-batch, and of pac-bayes-sigma; even"] = 20
    vectors: Annotated[int, "random vectors of trace and frobenius"] = 32
    normalize_logits: Annotated[bool, "subtract the mean of each sample's logits and divide them by their norm"] = False
    hvp: Annotated[hvp_backends.Hvp, hvp_backends.HVP_HELP] = "auto"
    kinks: Annotated[hvp_backends.Kinks, hvp_backends.KINKS_HELP] = "double"
    params: Annotated[str, parameter_selection.PARAMS_HELP] = ""
    seed: Annotated[int, "seed of noise and random vectors"] = 0

    def __post_init__(self) -> None:
        _ = self._radii, self._asked
        for name, least in {"steps": 1, "draws": 4, "vectors": 2}.items():
            at_least(name, getattr(self, name), least)
        require(self.draws % 2 == 0, "draws", self.draws, "even, because noise is drawn in pairs of opposite signs")
        one_of("hvp", self.hvp, get_args(hvp_backends.Hvp))
        one_of("kinks", self.kinks, get_args(hvp_backends.Kinks))
        regular_expression("params", self.params)

    def plan(self, subject: Subject) -> Plan:
        parameter_selection.matching(subject.parameters, self.params)  # fails before any work where nothing matches
        names, work = self._names(subject), self._work(subject)
        dims = ("measure",)
        normalised = ", normalised logits" if self.normalize_logits else ""
        return Plan(
            over={"unit": np.arange(len(work))},
            axes={"measure": np.arange(len(names))},
            labels={
                OF: (Quantity("measure of the unit", dims=("unit",)), np.array([k for k, _ in work])),
                "part": (Quantity("mini-batch, or random vector", dims=("unit",)), np.array([i for _, i in work])),
                **{
                    name: (Quantity(about, dims=dims), np.array(values))
                    for name, (about, values) in self._about(subject).items()
                },
            },
            quantities={
                TERM: Quantity("term of the measure (measure_units, of a root its square)", dims=dims),
                TERM_SE: Quantity(
                    "its standard error within the unit, NaN where there is none",
                    dims=dims,
                    over="independent values of the unit",
                ),
                SAMPLES: Quantity("samples that the term is a mean over"),
            },
            summaries={
                "value": Quantity("value of the measure (measure_units)", dims=dims),
                "n": Quantity("independent values behind its standard error, NaN for a residual", dims=dims),
                "se": Quantity("its standard error (error_over)", dims=dims, over="n"),
            },
            about={"unit": Quantity("unit of work")},
            facts={"protocol": f"{protocol(subject)}{normalised}"},
        )

    def identity(self, subject: Subject) -> dict[str, Any]:
        """The measures and radii that the options stand for; the backend changes nothing but rounding."""
        names = self._names(subject)
        return {"hvp": None, "measures": names, "rho": [self._radii[name] for name in names]}

    def autotune(self, subject: Subject) -> dict[str, str]:
        if not set(OF_HESSIAN) & set(self._names(subject)):
            return {}
        measured, planned = _measured(subject, self.normalize_logits), self._planned(subject)
        return hvp_backends.autotuned(measured, self.params, self.hvp, planned=planned, kinks=self.kinks)

    def sweep(self, subject: Subject, units: Sequence[Unit]) -> Iterator[Values]:
        names, work = self._names(subject), self._work(subject)
        measured = _measured(subject, self.normalize_logits)
        parameters = parameter_selection.matching(measured.parameters, self.params)
        terms = FlatnessTerms(measured, parameters, self._radii, self.steps, self.draws, self.seed)
        product: Product | None = None
        for unit in units:
            k, part = work[unit.index[0]]
            found = dict.fromkeys(names, (np.nan, np.nan))
            if names[k] in OF_HESSIAN and product is None:
                planned = self._planned(subject)
                curved = hvp_backends.curvature(measured, parameters, self.hvp, planned=planned, kinks=self.kinks)
                product = mini_batch_means.over_mini_batches(curved)
            if names[k] in OF_VECTORS:
                assert product is not None
                found |= {
                    name: (term, np.nan) for name, term in terms.of_vector(product, part).items() if name in found
                }
            elif names[k] == "top-eigenvalue":
                assert product is not None
                found[names[k]] = terms.top_eigenvalue(product)
            elif names[k] == "pac-bayes-sigma":
                found[names[k]] = terms.largest_noise()
            else:
                found[names[k]] = terms.of_batch(names[k], part)
            whole = MEASURES[names[k]].over not in ("mini-batches", "samples")
            both = np.array(list(found.values())).T
            yield {TERM: both[0], TERM_SE: both[1], SAMPLES: len(subject) if whole else subject.samples(part)}

    def reduce(self, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return pooled(data, self.draws)

    @cached_property
    def _radii(self) -> dict[str, float]:
        """The radius of every measure that has one, NaN for the others."""
        radii = {name: measure.radius for name, measure in MEASURES.items()}
        for part in filter(None, (part.strip() for part in self.rho.split(","))):
            name, _, text = part.partition("=")
            if np.isnan(radii.get(name, np.nan)):
                known = [name for name, radius in radii.items() if not np.isnan(radius)]
                raise OptionError(
                    f"--rho {part} names no measure with a radius; expected MEASURE=NUMBER with one of "
                    f"{', '.join(known)}{did_you_mean(name, known)}"
                )
            try:
                radii[name] = float(text)
            except ValueError:
                radii[name] = np.nan
            require(0 < radii[name] < np.inf, "rho", part, f"a positive number, such as {name}=0.1")
        return radii

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        return tuple(MEASURES) if self.measures == ALL else parse_choices("measures", self.measures, MEASURES)

    def _names(self, subject: Subject) -> list[str]:
        """The measures, in the order of the table.

        Raises:
            NotApplicable: one that was asked for by name does not apply.
        """
        without = _inapplicable(subject)
        if self.measures != ALL and (name := next((name for name in self._asked if name in without), "")):
            raise NotApplicable(f"--measures {name} needs {without[name]}; leave it out")
        return [name for name in MEASURES if name in self._asked and name not in without]

    def _work(self, subject: Subject) -> list[tuple[int, int]]:
        """The units: the position of a measure, and the mini-batch or random vector."""
        names = self._names(subject)
        work = [(names.index(name), 0) for name in ("pac-bayes-sigma", "top-eigenvalue") if name in names]
        vectors = next((name for name in OF_VECTORS if name in names), None)
        if vectors is not None:
            work += [(names.index(vectors), k) for k in range(self.vectors)]
        for k, name in enumerate(names):
            if MEASURES[name].over in ("mini-batches", "samples"):
                work += [(k, i) for i in range(len(subject.batches))]
        return work

    def _planned(self, subject: Subject) -> hvp_reference.PlannedProducts:
        names = self._names(subject)
        products = SEARCH * ("top-eigenvalue" in names) + self.vectors * bool(set(OF_VECTORS) & set(names))
        size = sum(p.numel() for p in parameter_selection.matching(subject.parameters, self.params).values())
        stored = SEARCH * size * subject.dtype.itemsize if "top-eigenvalue" in names else 0
        return hvp_reference.PlannedProducts(len(subject.batches), products, rebuilt=True, stored=stored)

    def _about(self, subject: Subject) -> dict[str, tuple[str, list[Any]]]:
        """What stands beside every measure, with what it is."""
        measures = [MEASURES[name] for name in self._names(subject)]
        scaled = [
            "yes" if self.normalize_logits and one.logit_scale == TOGETHER else one.logit_scale for one in measures
        ]
        return {
            "measure_name": ("measure", [one.name for one in measures]),
            "definition": ("definition", [one.definition for one in measures]),
            "measure_units": ("its units", [one.units.replace(LOSS, subject.meaning.units) for one in measures]),
            "rho": ("radius of the ball, or size of the noise", [self._radii[one.name] for one in measures]),
            "error_over": ("what the standard error is over", [one.over for one in measures]),
            "flatter": ("which values are flatter", [one.flatter for one in measures]),
            "invariant_rescaling": ("same for rescaled ReLU units", [one.rescaling for one in measures]),
            "invariant_logit_scale": ("same for multiples of the logits", scaled),
            "invariant_permutation": ("same for permuted hidden units", [one.permutation for one in measures]),
        }


@weights_cache.once_per_weights
def _measured(subject: Subject, normalize_logits: bool) -> Subject:
    """The subject without weight decay, with normalised logits if asked for."""
    plain = replace(subject, weight_decay=0.0)
    return linear_head.with_normalised_logits(plain) if normalize_logits else plain


@weights_cache.once_per_weights
def _inapplicable(subject: Subject) -> dict[str, str]:
    """Measures that do not apply, with what they need."""
    found = {}
    inputs, targets = subject.example()
    with subject.evaluating():
        _, right = subject.losses_and_right(subject.outputs(inputs), targets)
    if bool(right.isnan().any()):
        found["pac-bayes-sigma"] = "a classification error, which this loss does not define"
    if not has_relative_flatness(subject):
        found["relative-flatness"] = "logits (N, classes) of a linear layer, one network and a loss per sample of them"
    if subject.traits.mean_only or subject.traits.coupled:
        found["fisher-rao"] = "a loss per sample, and this one gives the mean of a mini-batch"
    for name, needs in found.items():
        _log.info("%s is left out: it needs %s", name, needs)
    return found

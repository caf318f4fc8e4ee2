"""The terms of the measures of flatness, unit by unit; see `statistics.flatness` for their definitions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from landscape.curvature.relative_flatness import fisher_rao_terms, relative_flatness
from landscape.curvature.spectrum import Request, spectrum
from landscape.curvature.trace_estimators import rademacher
from landscape.probe import derived_seed
from landscape.products.micro_batches import MicroBatching
from landscape.products.vectors import dot, flat, random_unit
from landscape.statistics.flatness import ERROR_RISE, MEASURES
from landscape.subject.sample_statistics import mean_and_standard_error
from landscape.subject.subject import Subject
from landscape.weight_space.moved_losses import (
    Ball,
    MovedLosses,
    auto_pgd,
    error_rises,
    largest_noise,
    mean_rise,
    one_step,
    separable,
)

TOP = Request(1, "LA", tol=1e-4, tol_residual=None, ends=1.0, max_products=200, vectors=False, verify=False)
FIRST_NOISE = 0.1  # times the root mean square of the weights: where the search of `pac-bayes-sigma` starts
Term = tuple[float, float]  # a term and its standard error
Product = Callable[[Tensor], Tensor]  # v -> H v, both (n,)


@dataclass(frozen=True)
class FlatnessTerms:
    """Terms of one subject, whose forward pass and loss are those that are measured."""

    subject: Subject
    parameters: Mapping[str, Tensor]  # that are moved, and differentiated by
    radii: Mapping[str, float]  # by the name of the measure
    steps: int  # of Auto-PGD
    draws: int  # of noise
    seed: int
    micro_batching: MicroBatching = field(default_factory=MicroBatching)

    def of_batch(self, name: str, i: int) -> Term:
        """The term of a mini-batch, of a measure whose terms are means over mini-batches or samples."""
        if name == "relative-flatness":
            return self._mean(i, partial(relative_flatness, self.subject, i))
        if name == "fisher-rao":
            return self._mean(i, partial(fisher_rao_terms, self.subject, self.parameters, i))
        with MovedLosses(self.subject, self.parameters, self.micro_batching) as losses:
            measure = MEASURES[name]
            scale = losses.weights.abs() if measure.adaptive else None
            ball = Ball("linf" if measure.norm == "linf" else "l2", self.radii[name], scale)
            if name == "sam":
                rise = one_step(losses, i, ball)
            elif "worst" in name:
                rise = auto_pgd(losses, i, ball, self.steps)
            else:
                return mean_rise(losses, i, ball, self.draws // 2, derived_seed(self.seed, name, i))
        return rise[0], math.nan if self.subject.traits.mean_only else rise[1]

    def largest_noise(self) -> Term:
        """`pac-bayes-sigma`: the noise at which the mean error over all samples has risen by `ERROR_RISE`."""
        seeds = [derived_seed(self.seed, "pac-bayes-sigma", k) for k in range(self.draws)]
        with MovedLosses(self.subject, self.parameters, self.micro_batching) as losses:
            right = [losses.losses_and_right(i)[1] for i in range(len(self.subject.batches))]
            intact = torch.cat(right).mean().item()
            guess = FIRST_NOISE * losses.weights.double().square().mean().sqrt().item()
            rises = partial(error_rises, losses, seeds=seeds, intact=intact)
            return largest_noise(rises, ERROR_RISE, guess or FIRST_NOISE)

    def top_eigenvalue(self, product: Product) -> Term:
        """The largest eigenvalue of the Hessian over all samples, with the estimated error of the search."""
        start = random_unit(
            len(self._like), derived_seed(self.seed, "top-eigenvalue"), device=self._like.device, dtype=self._like.dtype
        )
        try:
            found = spectrum(product, TOP, start, self.seed)
        except FloatingPointError:
            return math.nan, math.nan
        return float(found.values[0]), float(found.errors[0])

    def of_vector(self, product: Product, k: int) -> dict[str, float]:
        """The terms v'Hv of the trace and |Hv|^2 of the squared Frobenius norm, of random vector k with entries +-1."""
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "vector", k))
        vector = rademacher(len(self._like), generator).to(self._like)
        image = product(vector)
        return dict(
            zip(("trace", "frobenius"), torch.stack([dot(vector, image), dot(image, image)]).tolist(), strict=True)
        )

    @property
    def _like(self) -> Tensor:
        """The weights, flat, (n,)."""
        return flat(self.parameters.values()).detach()

    def _mean(self, i: int, terms: Callable[[slice], Tensor]) -> Term:
        """Of the terms of the samples of mini-batch i, which a function gives for some of them."""
        return mean_and_standard_error(torch.cat(self.micro_batching.each(separable(self.subject, i), terms)))

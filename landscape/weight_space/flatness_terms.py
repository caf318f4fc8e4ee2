"""The terms of the measures of flatness, unit by unit; see `statistics.flatness` for their definitions.

Exact are relative flatness, of the last layer, and the Fisher-Rao norm of the weights.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from landscape.curvature.spectrum import Request, spectrum
from landscape.data.structure import Nested
from landscape.probe import derived_seed
from landscape.products import hessian_product, micro_batches
from landscape.products.operator import WHOLE, part_of
from landscape.products.vectors import dot, flat
from landscape.random_vectors import signs
from landscape.statistics.flatness import ERROR_RISE, MEASURES
from landscape.subject.linear_head import NormalisedLogits, linear_head, normalised
from landscape.subject.sample_statistics import mean_and_standard_error
from landscape.subject.subject import Subject
from landscape.weight_space import moved_losses


def relative_flatness(subject: Subject, i: int, part: slice = WHOLE) -> Tensor:
    """Terms of the samples of mini-batch i, or a part of it, (N,) float64, whose mean is sum_{s,t} <w_s, w_t> Tr H_st.

    That is the relative flatness of the last linear layer (Petzka et al. 2021, arXiv 2001.00939).

    w_s are the rows of the weights of the last layer, z = W x + b, H_st the blocks of the Hessian of the loss with
    respect to them. With the Hessian K of a sample's loss with respect to its logits z, H_st = K_st x x', so that its
    term is |x|^2 sum_{s,t} K_st <w_s, w_t>: a forward pass and the K of all samples, and no estimate.

    Raises:
        ValueError: the logits (N, C) are not those of a linear layer.
    """
    inputs, targets = part_of(subject, i, part)
    found = linear_head(_unnormalised(subject), inputs)
    if found is None or found[2].dim() != 2:
        raise ValueError("the logits are not the outputs (N, classes) of a linear layer")
    head, features, logits = found
    weight = head.weight.detach()
    alike = (weight @ weight.T).double()  # <w_s, w_t>
    terms = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for s, row in enumerate(_hessian_rows(subject, logits.detach().clone(), targets)):
        terms += row.double() @ alike[s]
    return features.detach().double().square().sum(dim=1) * terms


def has_relative_flatness(subject: Subject) -> bool:
    """Whether the logits (N, C) are those of a linear layer, and the loss is one per sample."""
    if subject.members or subject.traits.mean_only or subject.traits.coupled:
        return False
    found = linear_head(_unnormalised(subject), subject.example()[0])
    return found is not None and found[2].dim() == 2 and found[1].dim() == 2


def _unnormalised(subject: Subject) -> Subject:
    """The subject whose outputs are the logits of the last layer."""
    return replace(subject, forward=subject.forward.base) if isinstance(subject.forward, NormalisedLogits) else subject


def _hessian_rows(subject: Subject, logits: Tensor, targets: Nested) -> list[Tensor]:
    """Rows K_s of the Hessian of every sample's loss with respect to its logits, (N, C) each."""
    with torch.enable_grad():
        logits.requires_grad_()
        given = normalised(logits) if isinstance(subject.forward, NormalisedLogits) else logits
        loss = subject.losses(given, targets).sum()
        (slope,) = torch.autograd.grad(loss, logits, create_graph=True)
        slope = slope + 0 * logits  # a loss that is linear in the logits has a graph too
        return [torch.autograd.grad(of.sum(), logits, retain_graph=True)[0] for of in slope.unbind(dim=1)]


def fisher_rao_terms(subject: Subject, parameters: Mapping[str, Tensor], i: int, part: slice = WHOLE) -> Tensor:
    """Terms <g, w>^2 of the samples of mini-batch i, or a part of it, (N,) float64, whose mean is w' F w.

    That is the squared Fisher-Rao norm, from the data's own labels (Liang et al. 2019, arXiv 1711.01530). g is the
    gradient of the sample's loss by the weights w, so that F is the empirical Fisher matrix. All <g, w> come from one
    double backward pass: they are the derivatives of sum_i s_i <g_i, w> by s.
    """
    inputs, targets = part_of(subject, i, part)
    weights = list(parameters.values())
    with torch.enable_grad(), hessian_product.differentiable_attention():
        losses = subject.losses(subject.outputs(inputs), targets)
        shares = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            shares @ losses, weights, create_graph=True, allow_unused=True, materialize_grads=True
        )
        along = torch.stack([(g * w.detach()).sum() for g, w in zip(gradients, weights, strict=True)]).sum()
    (slopes,) = torch.autograd.grad(along, shares)
    return slopes.double().square()


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
    micro_batching: micro_batches.MicroBatching = field(default_factory=micro_batches.MicroBatching)

    def of_batch(self, name: str, i: int) -> Term:
        """The term of a mini-batch, of a measure whose terms are means over mini-batches or samples."""
        if name == "relative-flatness":
            return self._mean(i, partial(relative_flatness, self.subject, i))
        if name == "fisher-rao":
            return self._mean(i, partial(fisher_rao_terms, self.subject, self.parameters, i))
        with moved_losses.MovedLosses(self.subject, self.parameters, self.micro_batching) as losses:
            measure = MEASURES[name]
            scale = losses.weights.abs() if measure.adaptive else None
            ball = moved_losses.Ball("linf" if measure.norm == "linf" else "l2", self.radii[name], scale)
            if name == "sam":
                rise = moved_losses.one_step(losses, i, ball)
            elif "worst" in name:
                rise = moved_losses.auto_pgd(losses, i, ball, self.steps)
            else:
                return moved_losses.mean_rise(losses, i, ball, self.draws // 2, derived_seed(self.seed, name, i))
        return rise[0], math.nan if self.subject.traits.mean_only else rise[1]

    def largest_noise(self) -> Term:
        """`pac-bayes-sigma`: the noise at which the mean error over all samples has risen by `ERROR_RISE`."""
        seeds = [derived_seed(self.seed, "pac-bayes-sigma", k) for k in range(self.draws)]
        with moved_losses.MovedLosses(self.subject, self.parameters, self.micro_batching) as losses:
            right = [losses.losses_and_right(i)[1] for i in range(len(self.subject.batches))]
            intact = torch.cat(right).mean().item()
            guess = FIRST_NOISE * losses.weights.double().square().mean().sqrt().item()
            rises = partial(moved_losses.error_rises, losses, seeds=seeds, intact=intact)
            return moved_losses.largest_noise(rises, ERROR_RISE, guess or FIRST_NOISE)

    def top_eigenvalue(self, product: Product) -> Term:
        """The largest eigenvalue of the Hessian over all samples, with the estimated error of the search."""
        seed = derived_seed(self.seed, "top-eigenvalue")
        try:
            found = spectrum(product, TOP, len(self._like), seed, self._like)
        except FloatingPointError:
            return math.nan, math.nan
        return float(found.values[0]), float(found.errors[0])

    def of_vector(self, product: Product, k: int) -> dict[str, float]:
        """The terms v'Hv of the trace and |Hv|^2 of the squared Frobenius norm, of random vector k with entries +-1."""
        like = self._like
        vector = signs(len(like), derived_seed(self.seed, "vector", k), device=like.device, dtype=like.dtype)
        image = product(vector)
        return dict(
            zip(("trace", "frobenius"), torch.stack([dot(vector, image), dot(image, image)]).tolist(), strict=True)
        )

    @property
    def _like(self) -> Tensor:
        return flat(self.parameters.values()).detach()

    def _mean(self, i: int, terms: Callable[[slice], Tensor]) -> Term:
        """Of the terms of the samples of mini-batch i, which a function gives for some of them."""
        return mean_and_standard_error(
            torch.cat(self.micro_batching.each(moved_losses.separable(self.subject, i), terms))
        )

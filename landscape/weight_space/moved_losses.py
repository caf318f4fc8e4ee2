"""Losses at weights moved by a flat vector: the largest in a ball (SAM, Auto-PGD), and the mean under random noise.

SAM: Foret et al., arXiv 2010.01412. Auto-PGD: Croce & Hein, arXiv 2003.01690, algorithm 1, for weights as in
Andriushchenko et al., arXiv 2302.07011.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from landscape import random_vectors
from landscape.probe import derived_seed
from landscape.products import operator, vectors
from landscape.products.micro_batches import MicroBatching
from landscape.statistics.means import mean_and_standard_error
from landscape.subject import sample_statistics
from landscape.subject.losses import loss_gradients
from landscape.subject.subject import Subject
from landscape.weight_space.weights_in_place import WeightsInPlace


class MovedLosses(contextlib.AbstractContextManager["MovedLosses"]):
    """A context manager that moves some parameters of a subject's model; on exit they have their original bits.

    Where a mini-batch does not fit into memory, its losses and their gradient are computed in micro-batches.
    """

    def __init__(
        self, subject: Subject, parameters: Mapping[str, Tensor], micro_batching: MicroBatching | None = None
    ) -> None:
        self.subject, self._parameters = subject, parameters
        self._micro_batching = micro_batching or MicroBatching()
        self._weights = WeightsInPlace(subject, parameters)

    def __exit__(self, *error: object) -> None:
        self._weights.restore()

    @property
    def weights(self) -> Tensor:
        return vectors.flat(self._weights.original.values())

    def move(self, change: Tensor) -> None:
        """Set the weights to the original ones plus a flat vector, (n,)."""
        pieces = vectors.unflat(change, list(self._parameters.values()))
        self._weights.translate((dict(zip(self._parameters, pieces, strict=True)), 1.0))

    def losses(self, i: int) -> Tensor:
        """The loss of every sample of mini-batch i at the present weights, (N,) float64."""
        return self.losses_and_right(i)[0]

    def losses_and_right(self, i: int) -> tuple[Tensor, Tensor]:
        """Loss and correctness of every sample, (N,) float64 each; NaN where the loss defines no correctness."""

        def work(part: slice) -> tuple[Tensor, Tensor]:
            inputs, targets = operator.part_of(self.subject, i, part)
            with self.subject.evaluating():
                return self.subject.losses_and_right(self.subject.outputs(inputs), targets)

        losses, right = zip(*self._micro_batching.each(separable(self.subject, i), work), strict=True)
        return torch.cat(losses).detach().double(), torch.cat(right).detach().double()

    def losses_and_gradient(self, i: int) -> tuple[Tensor, Tensor]:
        """The loss of every sample, (N,) float64, and the gradient of their mean, flat, (n,)."""
        parameters = list(self._parameters.values())

        def work(part: slice) -> tuple[Tensor, Tensor]:
            inputs, targets = operator.part_of(self.subject, i, part)
            with torch.enable_grad():
                losses = self.subject.losses(self.subject.outputs(inputs), targets)
            gradients = loss_gradients(losses.mean(), parameters)
            return losses.detach().double(), vectors.flat(gradients)

        found = self._micro_batching.each(separable(self.subject, i), work)
        if len(found) == 1:
            return found[0]
        losses = torch.cat([part for part, _ in found])
        return losses, torch.stack([gradient * (len(part) / len(losses)) for part, gradient in found]).sum(dim=0)


def separable(subject: Subject, i: int) -> int:
    """Into how many micro-batches mini-batch i can be split: its samples, 1 where they depend on each other."""
    return subject.samples(i) if subject.divisible and not subject.traits.coupled else 1


Norm = Literal["l2", "linf"]
# Of the mean loss of a mini-batch, and its standard error: over the samples at the change found, or over noise draws.
Rise = tuple[float, float]
KEPT = 0.75  # share of a projected step in the next point; the rest goes on along the last change (momentum)
IMPROVING = 0.75  # share of the steps since the last check that must improve the best point, else the step is halved


@dataclass(frozen=True)
class Ball:
    """Changes d of the weights with |d / scale| <= radius; weights whose scale is 0 do not change."""

    norm: Norm
    radius: float
    scale: Tensor | None = None  # (n,), not negative; None for 1

    def change(self, point: Tensor) -> Tensor:
        """The change of the weights at a point d / scale of the ball."""
        return point if self.scale is None else point * self.scale

    def uphill(self, gradient: Tensor) -> Tensor:
        """The direction of steepest ascent among those of norm 1, for a gradient with respect to the weights."""
        slope = gradient if self.scale is None else gradient * self.scale
        if self.norm == "linf":
            return slope.sign()
        length: Tensor = torch.linalg.vector_norm(slope)
        return slope / length.clamp_min(torch.finfo(slope.dtype).tiny)

    def inside(self, point: Tensor) -> Tensor:
        """The nearest point of the ball."""
        if self.norm == "linf":
            return point.clamp(-self.radius, self.radius)
        length: Tensor = torch.linalg.vector_norm(point)
        return point * (self.radius / length.clamp_min(self.radius))


def one_step(losses: MovedLosses, i: int, ball: Ball) -> Rise:
    """The rise by one step to the border of the ball, along the gradient (arXiv 2010.01412, equation 2 for p = 2)."""
    losses.move(torch.zeros_like(losses.weights))
    before, gradient = losses.losses_and_gradient(i)
    losses.move(ball.change(ball.radius * ball.uphill(gradient)))
    return sample_statistics.mean_and_standard_error(losses.losses(i) - before)


def auto_pgd(losses: MovedLosses, i: int, ball: Ball, steps: int) -> Rise:
    """The largest rise on the path of Auto-PGD from the weights themselves, so never negative: a lower bound.

    Steps start at twice the radius and are halved where the best point stops improving, from which the search then
    goes on. They are taken and projected in units of the scale, so that the path is as invariant as the ball is. The
    published code steps along scale * gradient and projects in units of the weights, and goes on from the last point
    after halving.

    A loss that is not finite ends the search: the rise is infinite.
    """
    here = torch.zeros_like(losses.weights)
    losses.move(here)
    start, gradient = losses.losses_and_gradient(i)
    best, best_value, best_losses, best_gradient = here, start.mean().item(), start, gradient
    before, step, improved, checked = here, 2 * ball.radius, 0, 0
    last = (step, best_value)  # step and best loss at the last check
    checks = _checks(steps)
    for k in range(steps):
        projected = ball.inside(here + step * ball.uphill(gradient))
        if k > 0:
            projected = ball.inside(here + KEPT * (projected - here) + (1 - KEPT) * (here - before))
        before, here = here, projected
        losses.move(ball.change(here))
        if k + 1 < steps:
            found, gradient = losses.losses_and_gradient(i)
        else:
            found = losses.losses(i)
        value = found.mean().item()
        if not math.isfinite(value):
            return math.inf, math.nan
        if value > best_value:
            best, best_value, best_losses, best_gradient, improved = here, value, found, gradient, improved + 1
        if k in checks:
            stuck = improved < IMPROVING * (k - checked) or last == (step, best_value)
            last, checked, improved = (step, best_value), k, 0
            if stuck:
                step, here, before, gradient = step / 2, best, best, best_gradient
    return sample_statistics.mean_and_standard_error(best_losses - start)


def _checks(steps: int) -> set[int]:
    """After which steps the length is reconsidered: at 22 % of them, then at intervals that shrink to 6 %."""
    shares, checks = [0.0, 0.22], [math.ceil(0.22 * steps)]
    while checks[-1] < steps:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
        checks.append(math.ceil(shares[-1] * steps))
    return set(checks)


FACTOR = 2.0  # between noises while the rise is bracketed
MOST = 2.0**10  # times the first noise; where even that does not reach the rise, it never does
WIDTH = 2.0**0.125  # ratio of the ends of the last bracket, inside which the rise is interpolated


def mean_rise(losses: MovedLosses, i: int, ball: Ball, pairs: int, seed: int) -> Rise:
    """Mean rise of a mini-batch's loss under noise of `radius` times `scale`, with its error over the pairs.

    Normal noise of that standard deviation for the norm l2, uniform up to it for linf, as in arXiv 2302.07011. Draws
    come in pairs of opposite signs, whose mean has the same expectation: what is odd in the noise, such as the slope
    of the loss, cancels.
    """
    weights = losses.weights
    losses.move(torch.zeros_like(weights))
    before = losses.losses(i).mean()
    rises = []
    for k in range(pairs):
        change = ball.change(ball.radius * noise(weights, derived_seed(seed, k), normal=ball.norm == "l2"))
        sides = []
        for moved in (change, -change):
            losses.move(moved)
            sides.append(losses.losses(i).mean() - before)
        rises.append(torch.stack(sides).mean())
    return mean_and_standard_error(torch.stack(rises).cpu().numpy())


def noise(like: Tensor, seed: int, *, normal: bool = True) -> Tensor:
    """Standard normal entries, or uniform ones in (-1, 1): the same on every device."""
    draw = random_vectors.normal if normal else random_vectors.uniform
    return draw(like.numel(), seed, device=like.device, dtype=like.dtype).view(like.shape)


def error_rises(losses: MovedLosses, sigma: float, seeds: Sequence[int], intact: float) -> np.ndarray:
    """Rise of the classification error over all samples by normal noise of this standard deviation, (draws,)."""
    found, weights = [], losses.weights
    for seed in seeds:
        losses.move(sigma * noise(weights, seed))
        right = [losses.losses_and_right(i)[1] for i in range(len(losses.subject.batches))]
        found.append(intact - torch.cat(right).mean())
    return np.asarray(torch.stack(found).cpu().numpy())


def largest_noise(rises: Callable[[float], np.ndarray], target: float, guess: float) -> tuple[float, float]:
    """The noise at which the mean of `rises`, (draws,), reaches a target, and its standard error over the draws.

    The draws must be the same for every noise (common random numbers): their mean is then a smooth function, nearly.
    It is bracketed by doubling or halving, bisected, and interpolated on the logarithmic scale; NaN where no noise
    reaches the target.
    """
    known = {guess: rises(guess)}
    low = high = guess
    while known[high].mean() <= target:
        low, high = high, high * FACTOR
        if high > guess * MOST:
            return math.nan, math.nan
        known[high] = rises(high)
    while known[low].mean() > target:
        low, high = low / FACTOR, low
        if low < guess / MOST:
            return math.nan, math.nan
        known[low] = rises(low)
    while high > low * WIDTH * (1 + 1e-9):
        middle = math.sqrt(low * high)
        known[middle] = rises(middle)
        low, high = (low, middle) if known[middle].mean() > target else (middle, high)
    below, above = known[low], known[high]
    slope = (above.mean() - below.mean()) / math.log(high / low)
    share = (target - below.mean()) / (above.mean() - below.mean())
    sigma = low * (high / low) ** share
    _, error = mean_and_standard_error(below + share * (above - below))
    return float(sigma), float(sigma * error / slope)

"""Search for the largest loss in a ball around the weights: one step of SAM, and Auto-PGD.

SAM: Foret et al., arXiv 2010.01412. Auto-PGD: Croce & Hein, arXiv 2003.01690, algorithm 1, for weights as in
Andriushchenko et al., arXiv 2302.07011.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from landscape.subject.sample_statistics import mean_and_standard_error
from landscape.weight_space.moved_losses import MovedLosses

Norm = Literal["l2", "linf"]
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


class Rise(NamedTuple):
    """A rise of the mean loss of a mini-batch."""

    value: float
    error: float  # its standard error: over the samples at the change that was found, or over noise draws


def one_step(losses: MovedLosses, i: int, ball: Ball) -> Rise:
    """The rise by one step to the border of the ball, along the gradient (arXiv 2010.01412, equation 2 for p = 2)."""
    losses.move(torch.zeros_like(losses.weights))
    before, gradient = losses.losses_and_gradient(i)
    losses.move(ball.change(ball.radius * ball.uphill(gradient)))
    return _rise(losses.losses(i), before)


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
            return Rise(math.inf, math.nan)
        if value > best_value:
            best, best_value, best_losses, best_gradient, improved = here, value, found, gradient, improved + 1
        if k in checks:
            stuck = improved < IMPROVING * (k - checked) or last == (step, best_value)
            last, checked, improved = (step, best_value), k, 0
            if stuck:
                step, here, before, gradient = step / 2, best, best, best_gradient
    return _rise(best_losses, start)


def _checks(steps: int) -> set[int]:
    """After which steps the length is reconsidered: at 22 % of them, then at intervals that shrink to 6 %."""
    shares, checks = [0.0, 0.22], [math.ceil(0.22 * steps)]
    while checks[-1] < steps:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
        checks.append(math.ceil(shares[-1] * steps))
    return set(checks)


def _rise(after: Tensor, before: Tensor) -> Rise:
    return Rise(*mean_and_standard_error(after - before))

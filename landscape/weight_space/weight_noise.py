"""Loss and error under random noise of the weights: their mean rise, and the noise that a given rise allows."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from landscape.probe import derived_seed
from landscape.statistics.means import mean_and_standard_error
from landscape.weight_space.ascent import Ball, Rise
from landscape.weight_space.moved_losses import MovedLosses

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
    return Rise(*mean_and_standard_error(torch.stack(rises).cpu().numpy()))


def noise(like: Tensor, seed: int, *, normal: bool = True) -> Tensor:
    """Standard normal entries, or uniform ones in [-1, 1], drawn on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn if normal else torch.rand
    drawn = draw(like.shape, generator=generator, dtype=torch.float32).to(like)
    return drawn if normal else 2 * drawn - 1


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

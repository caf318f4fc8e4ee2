"""Fit the temperature of a network's probabilities (Guo et al. 2017, arXiv 1706.04599, section 4.2).

The negative log likelihood of softmax(z / T) is convex in b = 1/T. Its first two derivatives are summed over samples
at fixed temperatures, so that one pass over the data suffices in any order, in memory that does not grow with it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor

LOWEST, HIGHEST, STEPS = 0.05, 20.0, 65  # temperatures; a step of 10 %, between which a cubic is exact to 1e-6
INVERSE = np.geomspace(1 / HIGHEST, 1 / LOWEST, STEPS)
LEAST = -1e6  # of a logit below the largest: -inf, the log of 0, would give 0 * inf
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature and its standard error, NaN where the fit ends at a limit of its range."""

    value: float
    error: float


class TemperatureFit:
    """Sums over the samples seen so far."""

    def __init__(self) -> None:
        self._slope, self._square, self._curvature = np.zeros((3, STEPS))

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Take the logits (N, C) and classes (N,), or soft targets (N, C), of some samples."""
        shares = targets.double() if targets.is_floating_point() else None
        finite = (logits - logits.amax(dim=1, keepdim=True)).clamp(min=LEAST)
        own = finite.gather(1, targets[:, None])[:, 0] if shares is None else (shares * finite).sum(dim=1)
        weight = 1.0 if shares is None else shares.sum(dim=1)
        sums = []
        for inverse in INVERSE.tolist():
            p = (inverse * finite).softmax(dim=1)
            mean = (p * finite).sum(dim=1)
            slope = weight * mean - own
            curvature = weight * (p * (finite - mean[:, None]).square()).sum(dim=1)
            sums.append(torch.stack([slope.sum(), slope.square().sum(), curvature.sum()]))
        slopes, squares, curvatures = torch.stack(sums, dim=1).cpu().numpy()
        self._slope += slopes
        self._square += squares
        self._curvature += curvatures

    def fitted(self) -> Temperature:
        """The temperature of the lowest negative log likelihood; its error is of the sandwich form."""
        if not self._curvature.any() or self._slope[0] >= 0 or self._slope[-1] <= 0:
            flat = not self._curvature.any()
            value = 1.0 if flat else HIGHEST if self._slope[0] >= 0 else LOWEST
            _log.warning(
                "note: the temperature is %g, %s", value,
                "as none changes the probabilities" if flat
                else "an end of its range: the likelihood rises up to it",
            )  # fmt: skip
            return Temperature(value, math.nan)
        at = int(np.argmax(self._slope > 0))
        ends = slice(at - 1, at + 1)
        logarithms = np.log(INVERSE[ends])
        spline = CubicHermiteSpline(logarithms, self._slope[ends], self._curvature[ends] * INVERSE[ends])
        (root, *_) = spline.roots(extrapolate=False)
        square, curvature = (np.interp(root, logarithms, sums[ends]) for sums in (self._square, self._curvature))
        inverse = math.exp(root)
        return Temperature(1 / inverse, float(np.sqrt(square) / curvature / inverse**2))

"""Fit the temperature of a network's probabilities (Guo et al. 2017, arXiv 1706.04599, section 4.2).

The negative log likelihood of softmax(z / T) is convex in b = 1/T. Its first two derivatives are summed over samples
at fixed temperatures, so that one pass over the data suffices in any order, in memory that does not grow with it.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline
from torch import Tensor

from landscape.predictions.scores import labelled
from landscape.probe import derived_seed
from landscape.subject.sample_statistics import first_row
from landscape.subject.subject import Subject

LOWEST, HIGHEST, STEPS = 0.05, 20.0, 65  # temperatures; a step of 10 %, between which a cubic is exact to 1e-6
MOMENTS = 4
AT_ONCE = 1 << 17  # numbers per operation, of several temperatures
ROWS = 4096  # labels or pixels of a sample that a temperature is fitted on
INVERSE = np.geomspace(1 / HIGHEST, 1 / LOWEST, STEPS)
LEAST = -1e6  # of a logit below the largest: -inf, the log of 0, would give 0 * inf
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature and its standard error, NaN where the fit ends at a limit of its range."""

    value: float
    error: float


class TemperatureFit:
    """Sums over the samples seen so far, (MOMENTS, STEPS): NLL, its slope, the slope's square, curvature, over 1/T."""

    def __init__(self, sums: np.ndarray | None = None) -> None:
        self.sums = np.zeros((MOMENTS, STEPS)) if sums is None else sums

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Take the logits (N, C) and classes (N,), or soft targets (N, C), of some samples.

        Of samples of several rows (N, rows, C) the mean over those with a label; of more than `ROWS` so many, evenly
        spaced.
        """
        if logits.dim() == 3 and logits.shape[1] > ROWS:
            spaced = torch.linspace(0, logits.shape[1] - 1, ROWS).long().to(logits.device)
            logits, targets = logits[:, spaced], targets[:, spaced]
        there, samples = labelled(targets), len(logits)
        share: Tensor | float = 1.0
        if there is not None:
            share = (there / there.sum(dim=1, keepdim=True).clamp(min=1)).flatten()
            logits = logits.flatten(0, 1)
            targets = targets.flatten(0, 1) if targets.is_floating_point() else targets.clamp(min=0).flatten()
        logits = logits.double()
        shares = targets.double() if targets.is_floating_point() else None
        finite = (logits - logits.amax(dim=1, keepdim=True)).clamp(min=LEAST)
        own = finite.gather(1, targets[:, None])[:, 0] if shares is None else (shares * finite).sum(dim=1)
        weight = 1.0 if shares is None else shares.sum(dim=1)
        sums = []
        several = max(1, AT_ONCE // finite.numel())
        for inverse in torch.split(torch.as_tensor(INVERSE).to(finite.device, non_blocking=True), several):
            scaled = inverse[:, None, None] * finite  # (temperature, row, class)
            logarithms = scaled.log_softmax(dim=2)
            p = logarithms.exp()
            mean = (p * finite).sum(dim=2)
            slope = weight * mean - own
            curvature = weight * (p * (finite - mean[:, :, None]).square()).sum(dim=2)
            nll = (scaled[:, :, 0] - logarithms[:, :, 0]) * weight - inverse[:, None] * own
            nll, slope, curvature = (
                (share * part).view(len(inverse), samples, -1).sum(dim=2) for part in (nll, slope, curvature)
            )
            sums.append(torch.stack([part.sum(dim=1) for part in (nll, slope, slope.square(), curvature)]))
        self.sums = self.sums + torch.cat(sums, dim=1).cpu().numpy()

    def fitted(self, *, quiet: bool = False) -> Temperature:
        """The temperature of the lowest negative log likelihood; its error is of the sandwich form.

        Where the likelihood has no maximum it is an end of the range, which is logged unless `quiet`.
        """
        _, slopes, squares, curvatures = self.sums
        if not curvatures.any() or slopes[0] >= 0 or slopes[-1] <= 0:
            flat = not curvatures.any()
            value = 1.0 if flat else HIGHEST if slopes[0] >= 0 else LOWEST
            _log.log(
                logging.DEBUG if quiet else logging.WARNING, "note: the temperature is %g, %s", value,
                "as none changes the probabilities" if flat else "an end of its range: the likelihood rises up to it",
            )  # fmt: skip
            return Temperature(value, math.nan)
        at = int(np.argmax(slopes > 0))
        ends = slice(at - 1, at + 1)
        logarithms = np.log(INVERSE[ends])
        spline = CubicHermiteSpline(logarithms, slopes[ends], curvatures[ends] * INVERSE[ends])
        (root, *_) = spline.roots(extrapolate=False)
        square, curvature = (np.interp(root, logarithms, sums[ends]) for sums in (squares, curvatures))
        inverse = math.exp(root)
        return Temperature(1 / inverse, float(np.sqrt(square) / curvature / inverse**2))

    def nll(self, temperature: float) -> float:
        """The sum over samples of the negative log likelihood at a temperature."""
        spline = CubicHermiteSpline(np.log(INVERSE), self.sums[0], self.sums[1] * INVERSE)
        return float(spline(-math.log(temperature)))


def in_fit(subject: Subject, seed: int, i: int) -> np.ndarray:
    """Which samples of mini-batch i a temperature is fitted on: a random half of all, whatever the batch size."""
    start, n = first_row(subject, i), len(subject)
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(derived_seed(seed, "half")).permutation(n)[: n // 2]] = True
    return chosen[start : start + subject.samples(i)]

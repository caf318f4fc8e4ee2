"""How far features have collapsed to their classes: NC1 to NC4 (Papyan, Han & Donoho 2020), and class separation.

Class means are centred by the mean over classes. Errors are those of the jackknife that leaves out one of `GROUPS`
groups of samples at a time, each with its share of every class. NC4 counts samples on either side of a boundary, which
a jackknife overstates: its error is that of samples around fixed class means and that of the means, see `_nc4_error`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from landscape.layers.feature_dimension import UNKNOWN, Estimate

GROUPS = 20
DRAWS = 40  # resamples of the class means behind the error of NC4
LEAST_OF_A_CLASS = 2  # samples; a class with fewer is left out
RESOLUTION = 1e-7  # of the singular values of the class means, relative to the largest; features are stored in float32


@dataclass(frozen=True)
class _Sums:
    """What the measures of class means need: per class the number of samples, and sums over them."""

    count: np.ndarray  # (class,)
    total: np.ndarray  # (class, feature), of features
    units: np.ndarray  # (class, feature), of features at unit length

    def without(self, other: _Sums) -> _Sums:
        return _Sums(self.count - other.count, self.total - other.total, self.units - other.units)


def collapse(
    features: np.ndarray, classes: np.ndarray, decisions: np.ndarray | None, weight: np.ndarray | None
) -> dict[str, Estimate]:
    """Every measure of the features of samples, by name; NaN where there are too few.

    With M the class means, centred, (C, d):

    - `class_separation`: 1 - (mean cosine distance within a class) / (mean over all), each class with equal weight
      (Kornblith et al. 2021), over pairs of distinct samples.
    - `nc1`: tr(Sigma_W Sigma_B^+) / C, Sigma_W the covariance around the class means and Sigma_B = M' M / C.
    - `nc2_lengths`: standard deviation over mean of |m_c|. `nc2_angles`: standard deviation of cos(m_c, m_c') over
      pairs. `nc2_simplex`: mean of |cos(m_c, m_c') + 1 / (C - 1)|, the distance from a simplex.
    - `nc3`: |W / |W| - M / |M||^2, Frobenius norms, with the classifier's weights of these classes; 0 to 4.
    - `nc4`: share of samples where the network decides otherwise than for the nearest class mean, a sample's own class
      without itself.

    Args:
        features: (n, d) float64, finite.
        classes: of the samples, (n,) whole numbers from 0.
        decisions: class that the network chooses, (n,); None: there is no `nc4`.
        weight: of its linear classifier, (all classes, d), which reads these features; None: there is no `nc3`.
    """
    known, y, count = np.unique(classes, return_inverse=True, return_counts=True)
    enough = count >= LEAST_OF_A_CLASS
    kept = enough[y]
    names = ("class_separation", "nc1", "nc2_lengths", "nc2_angles", "nc2_simplex")
    also = (*(["nc3"] if weight is not None else []), *(["nc4"] if decisions is not None else []))
    if enough.sum() < 2:
        return dict.fromkeys((*names, *also), UNKNOWN)
    x, y, known = features[kept], (np.cumsum(enough) - 1)[y[kept]], known[enough]
    own = _of_classes(weight, known) if weight is not None else None
    middle = x.mean(axis=0)  # subtracted against cancellation
    length = np.linalg.norm(x, axis=1, keepdims=True)
    units = np.divide(x, length, out=np.zeros_like(x), where=length > 0)
    x = x - middle
    every = _sums(x, units, y, len(known))
    values = _measures(every, x, y, np.ones(len(x)), own)
    groups = _groups(y)
    replicates = []
    for group in range(GROUPS):
        out = groups == group
        left = every.without(_sums(x[out], units[out], y[out], len(known)))
        replicates.append(_measures(left, x, y, (~out).astype(float), own))
    spread = np.array(replicates).std(axis=0) * math.sqrt(GROUPS - 1)
    found = {name: Estimate(float(value), float(error)) for name, value, error in zip(
        (*names, *also[: own is not None]), values, spread, strict=True)}  # fmt: skip
    if decisions is not None:
        other = known[_nearest_mean(every, x, y)] != decisions[kept]
        found["nc4"] = Estimate(float(other.mean()), _nc4_error(other, x, y, known, decisions[kept]))
    return found


def _of_classes(weight: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The rows of some classes; NaN where the classifier does not have them."""
    rows = known.astype(int)
    return np.asarray(weight[rows] if rows.max() < len(weight) else np.full((len(rows), weight.shape[1]), np.nan))


def _sums(x: np.ndarray, units: np.ndarray, y: np.ndarray, classes: int, times: np.ndarray | None = None) -> _Sums:
    member = np.zeros((classes, len(y)))
    member[y, np.arange(len(y))] = 1.0 if times is None else times
    return _Sums(member.sum(axis=1), member @ x, member @ units)


def _groups(y: np.ndarray) -> np.ndarray:
    """A group for each sample, those of a class in turn, beginning at another group for each class."""
    groups = np.empty(len(y), dtype=int)
    for c in range(y.max() + 1):
        own = np.flatnonzero(y == c)
        groups[own] = (np.arange(len(own)) + c) % GROUPS
    return groups


def _measures(sums: _Sums, x: np.ndarray, y: np.ndarray, weights: np.ndarray, own: np.ndarray | None) -> list[float]:
    """Class separation, NC1, the three of NC2 and, with a classifier, NC3; `weights` is 0 for samples left out."""
    means = sums.total / sums.count[:, None]
    centre = means.mean(axis=0)
    means = means - centre
    classes = len(means)
    values, sides = np.linalg.eigh(means @ means.T / classes)
    large = values > RESOLUTION**2 * max(values[-1], np.finfo(float).tiny)
    large[0] = False  # the means sum to zero
    values, sides = values[large], sides[:, large]
    onto = means.T @ (sides / np.sqrt(classes * values))  # (feature, rank): eigenvectors of Sigma_B
    projected = x @ onto - centre @ onto
    within = (weights @ projected**2 - classes * values * (sums.count @ sides**2)) / weights.sum()
    nc1 = (within / values).sum() / classes if len(values) else math.nan
    length = np.linalg.norm(means, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = (means @ means.T / np.outer(length, length))[~np.eye(classes, dtype=bool)]
        lengths = length.std(ddof=1) / length.mean()
    found = [_separation(sums), nc1, lengths, cosine.std(), np.abs(cosine + 1 / (classes - 1)).mean()]
    if own is not None:
        norms = np.linalg.norm(own) * np.linalg.norm(means)
        found.append(2 - 2 * (own * means).sum() / norms if norms > 0 else math.nan)
    return [float(value) for value in found]


def _separation(sums: _Sums) -> float:
    """From |sum of units|^2 = n + the sum over pairs of distinct samples of their cosines."""
    n = sums.count
    pairs = np.where(n > 1, n * (n - 1), np.nan)
    cosine = ((sums.units**2).sum(axis=1) - n) / pairs  # mean within each class
    means = sums.units / n[:, None]
    between = (means.sum(axis=0) ** 2).sum() - (means**2).sum()
    within = np.nanmean(cosine) if np.isfinite(cosine).any() else math.nan
    overall = (between + len(n) * within) / len(n) ** 2
    return float(1 - (1 - within) / (1 - overall)) if overall < 1 else math.nan


def _nc4_error(other: np.ndarray, x: np.ndarray, y: np.ndarray, known: np.ndarray, decisions: np.ndarray) -> float:
    """Standard error of the share of `other` decisions (n,), over sets of samples.

    To the variance over samples around fixed class means that of the share by the error of the means is added: over
    bootstrap resamples of every class, of the share among the given samples. Samples near a boundary change sides by
    chance in each of them, which the former contains already: only the covariance of different samples counts.
    """
    n, rng = len(y), np.random.default_rng(0)
    sides = np.empty((DRAWS, n))
    for draw in sides:
        times = np.bincount(_resampled(y, rng), minlength=n).astype(float)
        draw[:] = known[_nearest_mean(_sums(x, x[:, :0], y, len(known), times), x, y, times)] != decisions
    of_means = (n**2 * sides.mean(axis=1).var(ddof=1) - sides.var(axis=0, ddof=1).sum()) / (n * (n - 1))
    return math.sqrt(other.var(ddof=1) / n + max(of_means, 0.0))


def _resampled(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions of as many samples of every class as there are, drawn with replacement."""
    own = [np.flatnonzero(y == c) for c in range(y.max() + 1)]
    return np.concatenate([rng.choice(positions, len(positions)) for positions in own])


def _nearest_mean(sums: _Sums, x: np.ndarray, y: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
    """The class with the nearest mean, that of a sample's own class without itself, (n,).

    `times`: how often each sample is in the sums, (n,); once by default. A class without others is not the nearest.
    """
    times = np.ones(len(y)) if times is None else times
    means = sums.total / sums.count[:, None]
    squared = (x**2).sum(axis=1)[:, None] - 2 * x @ means.T + (means**2).sum(axis=1)
    rows, others = np.arange(len(y)), sums.count[y] - times
    with np.errstate(invalid="ignore", divide="ignore"):  # x - m without x is (x - m) count / others
        squared[rows, y] = np.where(others > 0, squared[rows, y] * (sums.count[y] / others) ** 2, np.inf)
    return np.asarray(squared.argmin(axis=1))

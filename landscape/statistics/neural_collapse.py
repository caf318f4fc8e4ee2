"""How far features have collapsed to their classes: NC1 to NC4 (Papyan, Han & Donoho 2020), and class separation.

Class means are centred by the mean over classes. Errors are those of the jackknife that leaves out one of `GROUPS`
groups of samples at a time, each with its share of every class. NC4 counts samples on either side of a boundary, which
a jackknife overstates: its error is that of samples around fixed class means and that of the means, see `_nc4_error`.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from landscape.statistics.feature_dimension import UNKNOWN, Estimate

GROUPS = 20
DRAWS = 40  # resamples of the class means behind the error of NC4
LEAST_OF_A_CLASS = 2  # samples; a class with fewer is left out
AT_ONCE = 1 << 20  # numbers that sets of samples are measured by at a time
RESOLUTION = 1e-7  # of the singular values of the class means, relative to the largest; features are stored in float32


@dataclass(frozen=True)
class _Sums:
    """What the measures of class means need, of several sets of the samples: per class the number, and sums over it."""

    count: np.ndarray  # (set, class)
    total: np.ndarray  # (set, class, feature), of features
    units: np.ndarray  # (set, class, feature), of features at unit length


class Labels:
    """Classes of samples, whole numbers from 0, with the sets of samples that errors come from, for all layers."""

    def __init__(self, classes: np.ndarray) -> None:
        every, y, count = np.unique(classes, return_inverse=True, return_counts=True)
        enough = count >= LEAST_OF_A_CLASS
        order = np.argsort(y, kind="stable")
        self.kept = order[enough[y[order]]]  # samples of a class that counts, (n,), class by class
        self.y, self.known = (np.cumsum(enough) - 1)[y[self.kept]], every[enough]  # positions among the known classes
        ends = np.cumsum(count[enough])
        self.of_class = [slice(end - size, end) for end, size in zip(ends, count[enough], strict=True)]

    @cached_property
    def without_groups(self) -> np.ndarray:
        """1 for the samples of a set, of all and without each group, (set, n); a class's are in the groups in turn."""
        groups = np.empty(len(self.y), dtype=int)
        for c, own in enumerate(self.of_class):
            groups[own] = (np.arange(own.stop - own.start) + c) % GROUPS
        return np.concatenate([np.ones((1, len(groups))), groups != np.arange(GROUPS)[:, None]])

    @cached_property
    def resamples(self) -> np.ndarray:
        """How often each sample is drawn, (draw, n): as many of every class as there are, with replacement."""
        rng, times = np.random.default_rng(0), np.empty((DRAWS, len(self.y)))
        for row in times:
            sizes = [(own.start, own.stop - own.start) for own in self.of_class]
            drawn = [start + rng.integers(size, size=size) for start, size in sizes]
            row[:] = np.bincount(np.concatenate(drawn), minlength=len(row))
        return times

    def parts(self, sets: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
        """Some sets of samples (set, n) after the others, within memory."""
        size = max(1, AT_ONCE // (len(self.known) * max(x.shape)))
        return [sets[start : start + size] for start in range(0, len(sets), size)]


def collapse(
    features: np.ndarray, labels: Labels, decisions: np.ndarray | None, weight: np.ndarray | None
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
        labels: classes of the samples, (n,).
        decisions: class that the network chooses, (n,); None: there is no `nc4`.
        weight: of its linear classifier, (all classes, d), which reads these features; None: there is no `nc3`.
    """
    kept, known = labels.kept, labels.known
    names = ("class_separation", "nc1", "nc2_lengths", "nc2_angles", "nc2_simplex")
    also = (*(["nc3"] if weight is not None else []), *(["nc4"] if decisions is not None else []))
    if len(known) < 2 or not len(features):
        return dict.fromkeys((*names, *also), UNKNOWN)
    x = features[kept]
    own = _of_classes(weight, known) if weight is not None else None
    middle = x.mean(axis=0)  # subtracted against cancellation
    length = np.linalg.norm(x, axis=1, keepdims=True)
    units = np.divide(x, length, out=np.zeros_like(x), where=length > 0)
    x = x - middle
    parts = labels.parts(labels.without_groups, x)
    values, *replicates = np.concatenate([_measures(_sums(x, units, labels, part), x, part, own) for part in parts])
    spread = np.array(replicates).std(axis=0) * math.sqrt(GROUPS - 1)
    found = {name: Estimate(float(value), float(error)) for name, value, error in zip(
        (*names, *also[: own is not None]), values, spread, strict=True)}  # fmt: skip
    if decisions is not None and known.min() < 0:
        found["nc4"] = UNKNOWN
    elif decisions is not None:
        other = known[_nearest_mean(x, labels, np.ones((1, len(x))))[0]] != decisions[kept]
        found["nc4"] = Estimate(float(other.mean()), _nc4_error(other, x, labels, decisions[kept]))
    return found


def _of_classes(weight: np.ndarray, known: np.ndarray) -> np.ndarray:
    """The rows of some classes; NaN where the classifier does not have them."""
    rows = known.astype(int)
    has_all = 0 <= rows.min() <= rows.max() < len(weight)  # not of targets such as +1 and -1, of a loss of their own
    return np.asarray(weight[rows] if has_all else np.full((len(rows), weight.shape[1]), np.nan))


def _sums(x: np.ndarray, units: np.ndarray, labels: Labels, times: np.ndarray) -> _Sums:
    """The sums of sets in which each sample is so many `times`, (set, n)."""
    total, unit = (np.stack([times[:, own] @ rows[own] for own in labels.of_class], axis=1) for rows in (x, units))
    return _Sums(np.add.reduceat(times, [own.start for own in labels.of_class], axis=1), total, unit)


def _measures(sums: _Sums, x: np.ndarray, weights: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """Class separation, NC1, the three of NC2 and, with a classifier, NC3 of every set, (set, measure).

    `weights` (set, n) is 0 for samples that are left out.
    """
    means = sums.total / sums.count[..., None]
    centre = means.mean(axis=1, keepdims=True)
    means = means - centre
    classes = means.shape[1]
    gram = means @ means.swapaxes(1, 2)
    values, sides = np.linalg.eigh(gram / classes)
    large = values > RESOLUTION**2 * np.maximum(values[:, -1:], np.finfo(float).tiny)
    large[:, 0] = False  # the means sum to zero
    values = np.where(large, values, 1.0)
    # (set, feature, rank): eigenvectors of Sigma_B, 0 where there is none
    onto = means.swapaxes(1, 2) @ (sides * (large / np.sqrt(classes * values))[:, None])
    projected = x @ onto
    projected -= centre @ onto
    inside = (weights[:, None] @ np.square(projected, out=projected))[:, 0]
    inside -= classes * values * (sums.count[:, None] @ sides**2)[:, 0]
    within = inside / weights.sum(axis=1, keepdims=True)
    nc1 = np.where(large.any(axis=1), np.where(large, within / values, 0.0).sum(axis=1) / classes, math.nan)
    length = np.linalg.norm(means, axis=2)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = (gram / (length[:, :, None] * length[:, None]))[:, ~np.eye(classes, dtype=bool)]
        lengths = length.std(axis=1, ddof=1) / length.mean(axis=1)
    simplex = np.abs(cosine + 1 / (classes - 1)).mean(axis=1)
    found = [_separation(sums), nc1, lengths, cosine.std(axis=1), simplex]
    if own is not None:
        norms = np.linalg.norm(own) * np.linalg.norm(means, axis=(1, 2))
        product = (own * means).sum(axis=(1, 2))
        found.append(np.where(norms > 0, 2 - 2 * product / np.where(norms > 0, norms, 1.0), math.nan))
    return np.stack(found, axis=1)


def _separation(sums: _Sums) -> np.ndarray:
    """Of every set, from |sum of units|^2 = n + the sum over pairs of distinct samples of their cosines."""
    n = sums.count
    pairs = np.where(n > 1, n * (n - 1), np.nan)
    cosine = ((sums.units**2).sum(axis=2) - n) / pairs  # mean within each class
    means = sums.units / n[..., None]
    between = (means.sum(axis=1) ** 2).sum(axis=1) - (means**2).sum(axis=(1, 2))
    known = np.isfinite(cosine)
    with np.errstate(invalid="ignore", divide="ignore"):
        within = np.where(known, cosine, 0.0).sum(axis=1) / known.sum(axis=1)
        overall = (between + n.shape[1] * within) / n.shape[1] ** 2
        return np.asarray(np.where(overall < 1, 1 - (1 - within) / (1 - overall), math.nan))


def _nc4_error(other: np.ndarray, x: np.ndarray, labels: Labels, decisions: np.ndarray) -> float:
    """Standard error of the share of `other` decisions (n,), over sets of samples.

    To the variance over samples around fixed class means that of the share by the error of the means is added: over
    bootstrap resamples of every class, of the share among the given samples. Samples near a boundary change sides by
    chance in each of them, which the former contains already: only the covariance of different samples counts.
    """
    n, parts = len(x), labels.parts(labels.resamples, x)
    sides = np.concatenate([labels.known[_nearest_mean(x, labels, part)] != decisions for part in parts])
    of_means = (n**2 * sides.mean(axis=1).var(ddof=1) - sides.var(axis=0, ddof=1).sum()) / (n * (n - 1))
    return math.sqrt(other.var(ddof=1) / n + max(of_means, 0.0))


def _nearest_mean(x: np.ndarray, labels: Labels, times: np.ndarray) -> np.ndarray:
    """The class with the nearest mean in every set, that of a sample's own class without itself, (set, n).

    `times`: how often each sample is in the sets, (set, n). A class without others is not the nearest.
    """
    y, sums = labels.y, _sums(x, x[:, :0], labels, times)
    means, length = sums.total / sums.count[..., None], np.einsum("ij,ij->i", x, x)[:, None]
    # Squared distances less the samples' own squares, (n, set, class): one product for all sets.
    squared = x @ (-2 * means.reshape(-1, x.shape[1])).T
    squared += (means**2).sum(axis=2).ravel()
    squared = squared.reshape(len(x), *means.shape[:2])
    rows, count = np.arange(len(y)), sums.count[:, y].T
    others = count - times.T
    with np.errstate(invalid="ignore", divide="ignore"):  # x - m without x is (x - m) count / others
        own = (squared[rows, :, y] + length) * (count / others) ** 2 - length
    squared[rows, :, y] = np.where(others > 0, own, np.inf)
    return np.asarray(squared.argmin(axis=2).T)

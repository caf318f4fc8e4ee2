"""Dimension of a cloud of features: effective rank, participation ratio and TwoNN, each with its standard error."""

import math
from typing import NamedTuple

import numpy as np

LEAST_SAMPLES = 4  # the unbiased moments divide by n (n - 2) (n - 3)
CENSORED = 0.1  # share of the largest ratios of distances; Facco et al. 2017 leave them out of their linear fit
LEAST_RATIOS = 10  # of distances, for an estimate with an error
ROWS = 128  # of distances at a time
RESOLUTION = 1e-12  # of eigenvalues, relative to the largest
SAME = 1e-6  # distance between samples that count as equal, relative to the root mean square


class Estimate(NamedTuple):
    """A number and its standard error; NaN where there is none."""

    value: float
    error: float


UNKNOWN = Estimate(math.nan, math.nan)


def scatter(centred: np.ndarray) -> np.ndarray:
    """The smaller one of the products x'x and x x' of centred features (n, d)."""
    return np.asarray(centred.T @ centred if centred.shape[1] <= len(centred) else centred @ centred.T)


def effective_rank(centred: np.ndarray, product: np.ndarray | None = None) -> Estimate:
    """exp(-sum_k p_k ln p_k), p_k = s_k / sum_j s_j (Roy & Vetterli 2007) of the singular values s of centred features.

    Features are (n, d) with mean 0, `product` is their `scatter`, if it is known already. s_k^2 / n are the eigenvalues
    of their covariance, from the smaller one of covariance and Gram matrix. The estimate is at most n - 1 and too low
    where n is not much larger than d. The error is the root of variance and squared bias, of the first and second order
    of the expansion in the samples' covariance (infinitesimal jackknife).
    """
    n, d = centred.shape
    if n < LEAST_SAMPLES:
        return UNKNOWN
    values, vectors = np.linalg.eigh((scatter(centred) if product is None else product) / n)
    keep = values > RESOLUTION * values[-1]
    if not keep.any() or values[-1] <= 0:
        return UNKNOWN
    values, vectors = values[keep], vectors[:, keep]
    squares = (centred @ vectors) ** 2 if d <= n else n * values * vectors**2  # (n, rank): squared principal components
    singular = np.sqrt(values)
    share = singular / singular.sum()
    logarithm = np.log(share)
    rank = math.exp(-float(share @ logarithm))
    slope = -rank * (logarithm + math.log(rank)) / singular.sum() / (2 * singular)  # d rank / d eigenvalue
    influence = squares @ slope - values @ slope
    bias = _bias(rank, logarithm, singular, slope, squares.T @ squares / n) / n
    return Estimate(rank, math.hypot(float(np.sqrt((influence**2).sum())) / n, bias))


def _bias(rank: float, logarithm: np.ndarray, singular: np.ndarray, slope: np.ndarray, fourth: np.ndarray) -> float:
    """Half of the mean over samples of the second derivative of the effective rank along x x' - C.

    With principal components z that is sum_kl F_kl (E z_k^2 z_l^2 - c_k c_l) + sum_k!=l g_kl E z_k^2 z_l^2, with the
    second derivatives F by the eigenvalues c of C, their first ones f, and g = (f_k - f_l) / (c_k - c_l).

    Args:
        rank: the effective rank.
        logarithm: of the shares p_k, (r,).
        singular: s_k, roots of the eigenvalues, (r,).
        slope: f_k, (r,).
        fourth: E z_k^2 z_l^2, (r, r).
    """
    values, total = singular**2, singular.sum()
    u = 1 + logarithm + math.log(rank)
    second = rank * np.outer(u / singular, u / singular) / (4 * total**2)
    second -= np.diag(rank / (4 * total * singular**3) + slope / (2 * values))
    apart = values[:, None] - values
    equal = np.abs(apart) <= SAME * values.max()
    turned = np.where(equal, second.diagonal() - second, (slope[:, None] - slope) / np.where(equal, 1.0, apart))
    np.fill_diagonal(turned, 0.0)
    return float((second * (fourth - np.outer(values, values)) + turned * fourth).sum()) / 2


def participation_ratio(centred: np.ndarray, product: np.ndarray | None = None) -> Estimate:
    """(tr C)^2 / tr C^2 of the covariance C, both without bias: the bias of the ratio falls as 1/n, also for n < d.

    Features are (n, d) with mean 0, `product` their `scatter` if it is known. Himeno & Yamada 2014 give the moments,
    which are those over distinct samples (Chun et al. 2025, arXiv 2509.26560, rows). The error is the jackknife over
    samples, exact.
    """
    n = len(centred)
    if n <= LEAST_SAMPLES:
        return UNKNOWN
    length = np.einsum("ij,ij->i", centred, centred)  # |x_i|^2
    total = length.sum()
    if not total > 0:
        return UNKNOWN
    small = centred.shape[1] <= n
    product = scatter(centred) if product is None else product
    # x_i' A x_i with the scatter matrix A, the sum over j of (x_i' x_j)^2
    form = np.einsum("ij,ij->i", centred @ product, centred) if small else np.einsum("ij,ij->i", product, product)
    ratio = float(_unbiased_ratio(n, total, form.sum(), (length**2).sum()))
    # Without sample i: the mean moves by -x_i / (n - 1).
    c = 1 / (n - 1)
    cross = centred @ (length @ centred)  # sum over j of |x_j|^2 x_i' x_j
    fourth = (length**2).sum() + 4 * c**2 * form + n * c**4 * length**2 + 4 * c * cross
    fourth += 2 * c**2 * length * total - (length * (1 + c) ** 2) ** 2  # its own term leaves the sum
    left = _unbiased_ratio(
        n - 1, total - (1 + c) * length, form.sum() - 2 * (1 + c) * form + ((1 + c) * length) ** 2, fourth
    )
    return Estimate(ratio, float(np.sqrt((n - 1) * left.var())))


def _unbiased_ratio(n: int, trace: np.ndarray, square: np.ndarray, fourth: np.ndarray) -> np.ndarray:
    """Ratio of unbiased estimates of (tr C)^2 and tr C^2, from tr A, tr A^2 and sum |x_i|^4, A the scatter matrix."""
    s, s2, q = trace / (n - 1), square / (n - 1) ** 2, fourth / (n - 1)
    of_trace = 2 * s2 + (n**2 - 3 * n + 1) * s**2 - n * q
    of_square = (n - 1) * (n - 2) * s2 + s**2 - n * q
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(of_square > 0, of_trace / of_square, np.nan))


def two_nn(centred: np.ndarray) -> Estimate:
    """Intrinsic dimension from the ratio of each sample's distances to its second and its first neighbour.

    The logarithm of the ratio is exponential with rate d (Facco et al. 2017). The estimate is that of maximum
    likelihood, corrected for its bias (Denti et al. 2022), with the largest tenth of the ratios censored, which Facco
    et al. leave out: d = (m - 1) / (sum of the m smallest logarithms + (n - m) times the largest of them). Samples that
    equal another one are left out. Too low where d is large and n small. The standard error is d / sqrt(m - 2) for
    independent ratios; those of samples that share a neighbour are not, whose products the sum of squares includes.
    """
    n = len(centred)
    if n < 3:
        return UNKNOWN
    (first, second), neighbours = nearest(centred)
    apart = first > SAME * math.sqrt(float((centred**2).sum()) / n)
    logarithms = np.log(second[apart] / first[apart])
    kept = len(logarithms) - int(CENSORED * len(logarithms))
    if kept < LEAST_RATIOS:
        return UNKNOWN
    largest = np.partition(logarithms, kept - 1)[kept - 1]
    below = float(np.minimum(logarithms, largest).sum())
    if not below > 0:
        return UNKNOWN
    dimension = (kept - 1) / below
    influence = (logarithms <= largest) - dimension * np.minimum(logarithms, largest)
    together = _dependent(neighbours[:, apart], np.flatnonzero(apart), influence) / float(influence @ influence)
    return Estimate(dimension, dimension * math.sqrt(max(together, 1.0) / (kept - 2)))


def _dependent(neighbours: np.ndarray, at: np.ndarray, influence: np.ndarray) -> float:
    """Sum of the products of the influences (m,) of samples that are neighbours or have one in common.

    Args:
        neighbours: the two of each, (2, m).
        at: the samples themselves, (m,).
        influence: of each on the estimate, (m,).
    """
    from scipy.sparse import csr_array

    members = np.stack([at, *neighbours], axis=1).ravel()
    sets = csr_array((np.ones(len(members)), members, np.arange(0, len(members) + 1, 3)))
    shared = sets @ sets.T  # its places, each once
    return float(np.repeat(influence, np.diff(shared.indptr)) @ influence[shared.indices])


def nearest(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances of every sample (n, d) to its nearest and its second nearest neighbour, and which these are, (2, n)."""
    n = len(features)
    length = np.einsum("ij,ij->i", features, features)
    found, which = np.empty((2, n)), np.empty((2, n), dtype=int)
    memory = np.empty((min(ROWS, n), n))  # once: the system clears new memory
    for start in range(0, n, ROWS):
        part = features[start : start + ROWS]
        rows = np.arange(len(part))
        squared = np.matmul(-2 * part, features.T, out=memory[: len(part)])
        squared += length  # without the part's own length, which does not change the order
        squared[rows, start + rows] = np.inf
        for place, chosen in zip(found, which, strict=True):
            chosen[start : start + ROWS] = other = squared.argmin(axis=1)
            squared[rows, other] = np.inf
            difference = part - features[other]  # again, without cancellation
            place[start : start + ROWS] = np.sqrt(np.einsum("ij,ij->i", difference, difference))
    return np.sort(found, axis=0), which

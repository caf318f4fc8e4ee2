"""How different the spectra of the Hessian's diagonal blocks are: Jensen-Shannon distances from stored quadratures."""

from typing import Any

import numpy as np
from scipy.special import ndtr

from landscape.statistics.means import jackknife_error, mean_and_standard_error

LINEAR = 0.3  # of the scale: the axis of eigenvalues is linear within it and logarithmic beyond
WIDTH = 0.25  # standard deviation of the Gaussian on that axis; 25 % of an eigenvalue far from zero
BINS = 5  # per width
REACH = 6  # widths on both sides of a node that get some of its weight
EQUAL = 1e-12  # weights that differ by less are those of exact eigenvalues
NEGLIGIBLE = 1e-6  # a block whose eigenvalues are below this share of the largest block's is one of zeros
DEFINITION = (
    f"mean over pairs of blocks of sqrt(JSD), JSD in bits: 0 equal, 1 disjoint; densities over asinh(eigenvalue / "
    f"({LINEAR:g} s)), broadened by {WIDTH:g} there, s the median over blocks of the root mean square eigenvalue"
)


def heterogeneity(nodes: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    """Distances between the spectral densities of blocks, with standard errors, from quadratures padded with NaN.

    The distance is the square root of the Jensen-Shannon divergence in bits, 0 for equal and 1 for disjoint densities.
    The density of a block is the mean over start vectors of its quadratures, every node a Gaussian of the width 0.25 on
    the axis u = asinh(eigenvalue / (0.3 s)): 0.075 s around zero, a quarter of the eigenvalue far from it. Axis and
    width come from the scale s, the median over blocks of their root mean square eigenvalues, which a quadrature gives
    without bias from two steps on: more steps and vectors bring the distance to that of the exact spectra. For
    `shape_distance` the eigenvalues of each block are first divided by its own root mean square (s = 1), so that
    blocks differing by a factor are equal.

    Zhang et al. (arXiv 2402.16788) average the distance over all pairs of blocks too. Their published code broadens by
    0.003 on a linear axis in units of the loss, whatever the scale of the spectrum, and has no code for the distance,
    so their values cannot be reproduced from it, and are not on this scale.

    Errors are those of a jackknife over start vectors. It also removes the bias of the divergences: noise makes equal
    densities differ. The bias is left in with a single vector, whose errors are NaN. `heterogeneity_half_steps` comes
    from half of the Lanczos steps, which the stored nodes and weights contain: where it is far off, take more steps.
    Blocks whose eigenvalues are exact, with equal weights, stay as they are.

    Args:
        nodes: of every start vector and block, (vector, block, node).
        weights: likewise; those of a quadrature sum to 1. Blocks that are NaN throughout have NaN distances.
    """
    known = np.isfinite(nodes[:, :, 0]).all(axis=0)
    nodes, weights = nodes[:, known], weights[:, known]
    found: dict[str, Any] = {}
    for name, own in (("js", False), ("shape", True)):
        distance, error, mean, mean_error = _jackknifed(nodes, weights, own_scale=own)
        found |= {f"{name}_distance": _spread(distance, known), f"{name}_distance_se": _spread(error, known)}
        prefix = "" if name == "js" else "shape_"
        found |= {f"{prefix}heterogeneity": mean, f"{prefix}heterogeneity_se": mean_error}
    half = np.full((2, *nodes.shape), np.nan)
    for at in np.ndindex(nodes.shape[:2]):
        half[(slice(None), *at)] = _half(nodes[at], weights[at])
    return found | {"heterogeneity_half_steps": _jackknifed(*half, own_scale=False)[2]}


def moments(nodes: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and mean squared eigenvalue of every block with standard errors over start vectors, and both ends."""
    found: dict[str, np.ndarray] = {}
    for power, name in ((1, "mean"), (2, "mean_square")):
        values = np.where(
            np.isnan(nodes[:, :, 0]), np.nan, np.nansum(nodes**power * weights, axis=2)
        )  # (vector, block)
        found[name], found[f"{name}_se"] = np.array([mean_and_standard_error(block) for block in values.T]).T
    ends = {"largest": np.fmax, "smallest": np.fmin}
    return found | {name: end.reduce(end.reduce(nodes, axis=2), axis=0) for name, end in ends.items()}


def densities(nodes: np.ndarray, weights: np.ndarray, *, own_scale: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Edges of the bins on the axis u, the probability in each for every block, (block, bin), and the scale of u."""
    squares = np.nansum(nodes**2 * weights, axis=2).mean(axis=0)
    rms = np.sqrt(squares)
    largest = float(rms.max(initial=0.0)) or 1.0
    scale = np.maximum(rms, NEGLIGIBLE * largest) if own_scale else np.full(len(rms), float(np.median(rms)) or largest)
    u = np.arcsinh(nodes / (LINEAR * scale[:, None]))
    step = WIDTH / BINS
    end = np.ceil((np.nanmax(np.abs(u), initial=0.0) + REACH * WIDTH) / step) + 1
    edges = step * np.arange(-end, end + 1)
    finite = np.isfinite(u) & np.isfinite(weights)
    block = np.nonzero(finite)[1]
    at, share = u[finite], weights[finite] / len(nodes)
    first = np.floor(at / step).astype(int) + int(end) - REACH * BINS
    bins = first[:, None] + np.arange(2 * REACH * BINS + 1)
    cumulative = ndtr((edges[np.append(bins, bins[:, -1:] + 1, axis=1)] - at[:, None]) / WIDTH)
    cumulative[:, 0], cumulative[:, -1] = 0.0, 1.0
    count = len(edges) - 1
    places, mass = block[:, None] * count + bins, share[:, None] * np.diff(cumulative, axis=1)
    probability = np.bincount(places.ravel(), mass.ravel(), minlength=len(scale) * count)
    return edges, probability.reshape(len(scale), count), float(LINEAR * scale[0])


def _divergences(nodes: np.ndarray, weights: np.ndarray, *, own_scale: bool) -> np.ndarray:
    """Jensen-Shannon divergences of every two blocks in bits, H((p + q) / 2) - (H(p) + H(q)) / 2, (block, block)."""
    if not nodes.shape[1]:
        return np.zeros((0, 0))
    _, p, _ = densities(nodes, weights, own_scale=own_scale)
    entropy = _entropy(p)
    divergence = np.zeros((len(p), len(p)))
    for i in range(len(p)):
        divergence[i, i + 1 :] = _entropy((p[i] + p[i + 1 :]) / 2) - (entropy[i] + entropy[i + 1 :]) / 2
    return np.clip(divergence + divergence.T, 0.0, 1.0)


def _entropy(p: np.ndarray) -> np.ndarray:
    """In bits, of every row."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.nansum(p * np.log2(p), axis=1)  # type: ignore[no-any-return]


def _jackknifed(
    nodes: np.ndarray, weights: np.ndarray, *, own_scale: bool
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Distances without the bias of the divergences, their errors, and mean and error over pairs."""
    count = len(nodes)
    whole = _divergences(nodes, weights, own_scale=own_scale)
    if count < 2:
        unknown = np.full_like(whole, np.nan)
        return np.sqrt(whole), unknown, _mean_of_pairs(np.sqrt(whole)), np.nan
    left_out = ((np.delete(nodes, i, axis=0), np.delete(weights, i, axis=0)) for i in range(count))
    parts = np.stack([_divergences(*kept, own_scale=own_scale) for kept in left_out])
    distance = np.sqrt(np.maximum(count * whole - (count - 1) * parts.mean(axis=0), 0.0))
    errors = [jackknife_error(np.sqrt(parts)), jackknife_error(np.array([_mean_of_pairs(np.sqrt(p)) for p in parts]))]
    return distance, errors[0], _mean_of_pairs(distance), float(errors[1])


def _mean_of_pairs(distance: np.ndarray) -> float:
    """NaN for fewer than two blocks."""
    pairs = distance[np.triu_indices(len(distance), 1)]
    return float(pairs.mean()) if pairs.size else np.nan


def _spread(matrix: np.ndarray, known: np.ndarray) -> np.ndarray:
    """A matrix of the known blocks, (block, block), with NaN for all others."""
    whole = np.full((len(known), len(known)), np.nan)
    whole[np.ix_(known, known)] = matrix
    return whole


def _half(nodes: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quadrature that half of the steps gave, NaN-padded: Lanczos with the nodes as operator repeats the run."""
    finite = np.isfinite(nodes)
    values, q = nodes[finite], np.sqrt(weights[finite])
    if not len(q) or np.ptp(q) <= EQUAL:
        return nodes, weights
    steps = -(-len(values) // 2)
    basis, matrix = np.zeros((steps, len(values))), np.zeros((steps, steps))
    for step in range(steps):
        basis[step] = q = q / np.linalg.norm(q)
        image = values * q
        matrix[step, step] = image @ q
        for _ in range(2):
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        q, beta = image, float(np.linalg.norm(image))
        if step + 1 == steps or beta <= 1e-12 * np.abs(values).max():
            matrix = matrix[: step + 1, : step + 1]
            break
        matrix[step, step + 1] = matrix[step + 1, step] = beta
    found, vectors = np.linalg.eigh(matrix)
    padded = np.full((2, len(nodes)), np.nan)
    padded[0, : len(found)], padded[1, : len(found)] = found, vectors[0] ** 2
    return padded[0], padded[1]

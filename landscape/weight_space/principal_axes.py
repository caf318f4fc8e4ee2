"""Principal component analysis of weight vectors from their Gram matrix alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PrincipalAxes:
    """The principal axes of T vectors D_t, as combinations of them."""

    coefficients: np.ndarray  # (components, T): axis k is sum_t coefficients[k, t] D_t, of unit norm
    coordinates: np.ndarray  # (components, T): <D_t, axis k>, not centred, so that D = 0 lies at the origin
    explained: np.ndarray  # share of the variance per axis, (components,)
    off_plane: np.ndarray  # distance of each D_t from the span of the axes, (T,)

    @property
    def names(self) -> list[str]:
        """Long names of the axes of a run."""
        shares = enumerate(self.explained, start=1)
        return [f"component {k} of the run ({100 * share:.0f} % of its variance)" for k, share in shares]


def principal_axes(gram: np.ndarray, components: int = 2) -> PrincipalAxes:
    """PCA of D_0 .. D_(T-1) from gram[s, t] = <D_s, D_t>: only a T x T matrix, whatever the number of parameters.

    The axes are those of the centred D_t, as in Li et al. 2018, section 7; their signs make the largest coordinate
    positive. Axes beyond the rank are zero.
    """
    count = len(gram)
    centring = np.eye(count) - 1.0 / count
    variances, vectors = np.linalg.eigh(centring @ gram @ centring)
    variances, vectors = np.clip(variances[::-1], 0.0, None), vectors[:, ::-1]
    total = variances.sum()
    coefficients = np.zeros((components, count))
    for k in range(min(components, count)):
        if variances[k] > 1e-12 * total:
            coefficients[k] = centring @ vectors[:, k] / np.sqrt(variances[k])
    coordinates = coefficients @ gram
    for k in range(components):
        if coordinates[k, np.abs(coordinates[k]).argmax()] < 0:
            coefficients[k], coordinates[k] = -coefficients[k], -coordinates[k]
    explained = np.zeros(components)
    explained[: min(components, count)] = variances[:components] / total if total > 0 else 0.0
    squared = np.diag(gram) - (coordinates**2).sum(axis=0)
    return PrincipalAxes(coefficients, coordinates, explained, np.sqrt(np.clip(squared, 0.0, None)))

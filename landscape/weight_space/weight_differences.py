"""Differences between checkpoints and the present weights: Gram matrix, principal axes, linear combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.snapshots import Snapshot
from landscape.checkpoints.state_dict_loading import with_model_keys, with_tied
from landscape.products.vectors import inner


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


GRAM_BYTES = 2**30  # of snapshots in memory at once


def difference(other: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Differences other - weights of the named parameters, on their device.

    Raises:
        ValueError: a parameter is missing or has another shape; names the first.
    """
    state = tensors_like(other, weights)
    return {name: state[name].to(weight) - weight for name, weight in weights.items()}


def tensors_like(other: Checkpoint, own: Mapping[str, Tensor], *, allow_missing: bool = False) -> dict[str, Tensor]:
    """The tensors of another checkpoint under the model's names, checked against the shapes of its own.

    Raises:
        ValueError: a tensor has another shape, or is missing; names the first.
    """
    state = with_tied(with_model_keys(other.state_dict, set(own)), own)
    for name, tensor in own.items():
        if name not in state and allow_missing:
            continue
        if name not in state or state[name].shape != tensor.shape:
            got = f"{name} is {tuple(state[name].shape)}" if name in state else f"{name} is missing"
            wanted = f"expected {tuple(tensor.shape)}; take checkpoints of one model"
            raise ValueError(f"{other.path} has another architecture: {got}, {wanted}")
    return state


def gram(snapshots: Sequence[Snapshot], weights: Mapping[str, Tensor]) -> np.ndarray:
    """<D_s, D_t> for D_t = w_t - weights, (T, T) float64; every file is read only a few times, in blocks."""
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    block = max(1, GRAM_BYTES // max(size, 1))
    products = np.zeros((len(snapshots), len(snapshots)))
    for start in range(0, len(snapshots), block):
        differences = [_of_snapshot(s, weights) for s in snapshots[start : start + block]]
        for t in range(start, len(snapshots)):
            other = differences[t - start] if t < start + block else _of_snapshot(snapshots[t], weights)
            for s in range(start, min(start + block, t + 1)):
                products[s, t] = products[t, s] = inner(differences[s - start].values(), other.values())
    return products


def combined(
    snapshots: Sequence[Snapshot], weights: Mapping[str, Tensor], coefficients: np.ndarray
) -> list[dict[str, Tensor]]:
    """sum_t coefficients[k, t] D_t for every k; one snapshot at a time is in memory."""
    sums = [{name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in coefficients]
    for t, snapshot in enumerate(snapshots):
        change = _of_snapshot(snapshot, weights)
        for total, row in zip(sums, coefficients, strict=True):
            for name in total:
                total[name].add_(change[name], alpha=row[t])
    return sums


def _of_snapshot(snapshot: Snapshot, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return difference(snapshot.read(), weights)

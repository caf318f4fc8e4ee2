"""Compute differences between checkpoints and the present weights, their Gram matrix and linear combinations."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import Checkpoint
from landscape.checkpoints.snapshots import Snapshot
from landscape.checkpoints.state_dict_loading import with_model_keys, with_tied
from landscape.products.vectors import inner

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

"""Differences between checkpoints and the present weights: their Gram matrix and linear combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import Checkpoint, read_checkpoint
from landscape.checkpoints.snapshots import Snapshot
from landscape.checkpoints.state_dict_loading import with_model_keys
from landscape.curvature.vectors import inner

GRAM_BYTES = 2**30  # of snapshots held at once


def difference(other: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Difference other - weights over the named parameters, on their device.

    Raises:
        ValueError: a parameter is missing or of another shape; names the first.
    """
    found = with_model_keys(other.state_dict, set(weights))
    for name, weight in weights.items():
        if name not in found or found[name].shape != weight.shape:
            got = f"is {tuple(found[name].shape)}" if name in found else "is missing"
            raise ValueError(
                f"{other.path} is of another architecture: {name} {got}, expected {tuple(weight.shape)}; "
                "take checkpoints of one model"
            )
    return {name: found[name].to(weight) - weight for name, weight in weights.items()}


def gram(snapshots: Sequence[Snapshot], weights: Mapping[str, Tensor]) -> np.ndarray:
    """<D_s, D_t> for D_t = w_t - weights, (T, T) float64; every file is read a few times only, in blocks."""
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    block = max(1, GRAM_BYTES // max(size, 1))
    products = np.zeros((len(snapshots), len(snapshots)))
    for start in range(0, len(snapshots), block):
        held = [difference(read_checkpoint(s.path), weights) for s in snapshots[start : start + block]]
        for t in range(start, len(snapshots)):
            other = held[t - start] if t < start + block else difference(read_checkpoint(snapshots[t].path), weights)
            for s in range(start, min(start + block, t + 1)):
                products[s, t] = products[t, s] = inner(held[s - start].values(), other.values())
    return products


def combined(
    snapshots: Sequence[Snapshot], weights: Mapping[str, Tensor], coefficients: np.ndarray
) -> list[dict[str, Tensor]]:
    """sum_t coefficients[k, t] D_t for every k; holds one snapshot beside the sums."""
    sums = [{name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in coefficients]
    for t, snapshot in enumerate(snapshots):
        change = difference(read_checkpoint(snapshot.path), weights)
        for total, row in zip(sums, coefficients, strict=True):
            for name in total:
                total[name].add_(change[name], alpha=row[t])
    return sums
